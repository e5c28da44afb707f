"""Which kernels took the time, and what they are."""
