"""Where `simplify_name` was; it is in `profkit.report.text`."""

from profkit.report.text import simplify_name

__all__ = ["simplify_name"]
