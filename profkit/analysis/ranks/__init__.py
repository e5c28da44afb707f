"""Collectives over all ranks: what each rank did between them, who arrives last and why, and what the wire carried."""
