"""PyTorch's caching allocator: its rules, and the replay that proves what it did. Pure: no files, no torch."""
