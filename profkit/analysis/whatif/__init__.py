"""Edits of a recorded program's allocations: what another optimizer, a checkpoint or a larger batch would ask for."""
