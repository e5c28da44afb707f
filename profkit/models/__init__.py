"""The annotated transformer language model and its size presets."""
