"""What the recipes on mixed precision observe: a toy model's dtypes, each operator's, and where LayerNorm breaks."""
