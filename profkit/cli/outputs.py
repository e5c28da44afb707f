"""What a command writes, and what it must never write over."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import click

from profkit.errors import ProfkitError, UsageError
from profkit.files import write_whole
from profkit.report.document import Document, Format, render
from profkit.report.text import make_visible
from profkit.run.directory import MANIFEST, Run


def refuse_overwriting(captures: Iterable[Path], outputs: Iterable[Path | None]) -> None:
    """Let no result take the place of a capture that is read, of a file of its run, or of another result.

    Every analyzer calls this before it reads or writes anything; links to the same file count as that file.

    Raises:
        UsageError: one would.
    """
    named = [output for output in outputs if output is not None]
    for capture, output in itertools.product(captures, named):
        if any(_is_same(output, path) for path in _files_of(capture)):
            raise UsageError(f"{output}: this is what is read (or a part of its run); write to another file")
    for first, second in itertools.combinations(named, 2):
        if _is_same(first, second):
            raise UsageError(f"{second}: two results would be written to this one file")


def require_png(plot: Path | None) -> None:
    """Let a picture be named as what it is.

    Raises:
        UsageError: it is not.
    """
    if plot is not None and plot.suffix.lower() != ".png":
        raise UsageError(f"--plot {plot}: the picture is a PNG; name it so")


def write_result(text: str, output: Path | None) -> None:
    """Print the result, or write it to a file that is whole or not there.

    Raises:
        ProfkitError: it is to be printed and standard output is closed.
        OSError: it cannot be written.
    """
    if output is not None:
        write_whole(output, (text + "\n").encode("utf-8", "replace"))
    elif sys.stdout is None:
        raise ProfkitError("standard output is closed; name a file with -o")
    elif sys.stdout.isatty():
        # Names stand in CSV as they are; a screen would obey what is in them.
        print("\n".join(map(make_visible, text.split("\n"))))
    else:
        # click.echo would take what looks like colours out of names.
        print(text)


def print_document(document: Document, style: Format, output: Path | None, *, full_names: bool = False) -> None:
    """Print a result, or write it to a file; what a reader must know goes to standard error too.

    Raises:
        ProfkitError: it is to be printed and standard output is closed.
        OSError: it cannot be written.
    """
    text = render(document, style, full_names=full_names, with_warnings=output is not None)
    # The failures head a table, but of a CSV or JSON a person sees no head.
    shown = [*document.failures, *document.warnings] if style in ("csv", "json") else document.warnings
    write_warnings(one.message for one in shown)
    write_result(text, output)


def write_warnings(messages: Iterable[str]) -> None:
    """Print warnings to stderr, one line each."""
    for message in messages:
        click.echo(f"warning: {make_visible(message)}", err=True)


def _files_of(capture: Path) -> list[Path]:
    folder = capture if capture.is_dir() else capture.parent
    return [capture, *(Run(folder).files if (folder / MANIFEST).exists() else [])]


def _is_same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return one.resolve() == other.resolve()
