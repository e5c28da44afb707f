"""Training steps recorded by Nsight Systems: the cells, how a capture is made and read, the report."""
