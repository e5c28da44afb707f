"""Which ranges each kernel lies under: the one rule, and what it needs."""
