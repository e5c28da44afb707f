"""The tree of range paths, and the modules in it."""
