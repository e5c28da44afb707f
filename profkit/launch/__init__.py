"""Outside the target's process: what a run does with it, Nsight Systems, the doctor. Never imports torch."""
