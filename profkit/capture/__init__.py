"""Inside the target's process: steps, hooks, ranges, times, torch.profiler, memory. May import torch."""
