"""A whole training step: the cells, the step itself, how it is measured, the report."""
