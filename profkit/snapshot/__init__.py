"""Memory: the columns of a PyTorch allocator snapshot, and the reader of its pickle."""
