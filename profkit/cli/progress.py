"""Show on a terminal what a command is doing, once it has taken a second."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_PATIENCE_S = 1.0


@contextmanager
def shown_after_a_second(doing: str) -> Iterator[None]:
    """Show ``doing`` on standard error while the block runs, if it is a terminal and a second has passed."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    with ExitStack() as shown:

        def show() -> None:
            # Loading rich takes a tenth of a second: quick commands never get here.
            from rich.console import Console
            from rich.text import Text

            shown.enter_context(Console(stderr=True).status(Text(f"{doing} …")))

        timer = threading.Timer(_PATIENCE_S, show)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
