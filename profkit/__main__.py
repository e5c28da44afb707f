"""``python -m profkit`` is ``profkit``."""

from profkit.cli import main

main()
