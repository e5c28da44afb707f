"""Attention by sequence length: the cells, the implementations, how one is measured, the report."""
