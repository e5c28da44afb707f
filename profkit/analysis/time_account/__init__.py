"""Steps, phases and idle time of a run: the only source of every step time."""
