"""How well the GPUs' time was used: busy and idle, work and bytes against the peaks, and what limits a range."""
