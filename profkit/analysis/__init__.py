"""Pure functions on the columns of a trace or a snapshot; nothing here draws, formats or needs torch."""
