"""Showing what is being done, on a terminal, once it has taken a second."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE_S = 1.0


@contextmanager
def shown_after_a_second(doing: str) -> Iterator[None]:
    """Show ``doing`` on standard error while the block runs, if it is a terminal and a second has passed."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.status import Status

    status = Status(f"{doing} …", console=Console(stderr=True))
    timer = threading.Timer(_PATIENCE_S, status.start)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()
