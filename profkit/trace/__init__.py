"""Time: the columns of a trace, and one reader per source."""
