"""A recorded step, run again from its own durations: what limits it, and what a change would leave of it."""
