"""The allocator's history, and whose tensors lie where."""
