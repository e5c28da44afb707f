"""The annotated transformer language model, its size presets, and its training script."""
