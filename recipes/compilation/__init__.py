"""What compile_speedup does: pairs of cells, eager and compiled; their times, their kernels, what fused into what."""
