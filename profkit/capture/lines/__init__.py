"""The source lines behind a step's time: which lines wait for the GPU, and where Python spends its time."""
