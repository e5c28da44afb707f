"""Outside the workload's process: targets, Nsight Systems, the run directory. Never imports torch."""
