"""Inside the program's process: what its errors are in one line, and how that line is printed without doing harm."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress

import torch

from profkit.errors import ProfkitError
from profkit.run.recording import Failure


def say(line: str) -> None:
    """Print a line of profkit's own to the program's standard error, if that can be written to."""
    # It may be closed, None, on a full disk, or an object of the program's own that raises anything.
    with suppress(Exception):
        sys.stderr.write(f"profkit: {line}\n")


def describe_error(error: Exception) -> str:
    """Return an error in one line: what the system says of it, else its type and text."""
    said = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return next(iter(said.strip().splitlines()), type(error).__name__)


def is_out_of_memory(error: BaseException | None) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def killed_rank(error: BaseException) -> tuple[int, str] | None:
    """Return the first rank that a signal ended, and the signal's name, by the error with which torchrun ends.

    Such a rank leaves no word itself. SIGTERM is how torchrun ends the others.
    """
    for rank, failure in getattr(error, "failures", {}).items():
        number = -getattr(failure, "exitcode", 0)
        if number in set(signal.Signals) - {signal.SIGTERM}:
            return int(rank), signal.Signals(number).name
    return None


def find_failure(rank: int | None) -> Failure | None:
    """Return the exception that ends this process, which has ``rank`` if it is one of several; None: none does."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return None
    said = str(error) if isinstance(error, ProfkitError) else f"{type(error).__name__}: {error}"
    killed = killed_rank(error)
    if killed is not None:
        rank, name = killed
        why = ", perhaps because the memory was full" if name == "SIGKILL" else ""
        return Failure(f"ended by {name}{why}", rank, by_signal=True)
    text = next(iter(said.strip().splitlines()), type(error).__name__)
    return Failure(text, rank, out_of_memory=is_out_of_memory(error))
