"""Compiled against eager code: the cells, how one is measured, pairs of cells, the report."""
