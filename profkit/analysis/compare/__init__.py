"""Two captures beside each other, and one against budgets."""
