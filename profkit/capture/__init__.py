"""Inside the workload's process: the training step, torch.profiler, memory recording. May import torch."""
