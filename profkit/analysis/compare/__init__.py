"""What changed between two captures, and whether a run keeps its budgets."""
