"""What a command prints or writes, and which files it must never overwrite."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import click

from profkit.cli.options import wants_safe_csv
from profkit.errors import ProfkitError, UsageError
from profkit.files import write_whole
from profkit.report.document import Document, Format, render, without_formulas
from profkit.report.text import make_visible
from profkit.run.directory import MANIFEST, Run


def refuse_overwriting(captures: Iterable[Path], outputs: Iterable[Path | None]) -> None:
    """Refuse outputs that would overwrite a capture that is read, a file of its run, or another output.

    Every analyzer calls this before it reads or writes anything; links to the same file count as that file.

    Raises:
        UsageError: an output would.
    """
    named = [output for output in outputs if output is not None]
    for capture, output in itertools.product(captures, named):
        if any(_is_same(output, path) for path in _files_of(capture)):
            raise UsageError(f"{output}: this file is being read, or belongs to the run that is; write to another file")
    for first, second in itertools.combinations(named, 2):
        if _is_same(first, second):
            raise UsageError(f"{second}: two results would be written to this file")


def require_png(plot: Path | None) -> None:
    """Refuse a name for a picture that does not end in ``.png``.

    Raises:
        UsageError: it does not.
    """
    if plot is not None and plot.suffix.lower() != ".png":
        raise UsageError(f"--plot {plot}: the picture is a PNG file; end its name in .png")


def write_result(text: str, output: Path | None) -> None:
    """Print the result, or write it to a file, which appears whole or not at all.

    Raises:
        ProfkitError: there is no file, and standard output is closed.
        OSError: it cannot be written.
    """
    if output is not None:
        write_whole(output, (text + "\n").encode("utf-8", "replace"))
    elif sys.stdout is None:
        raise ProfkitError("standard output is closed; name a file with -o")
    elif sys.stdout.isatty():
        # CSV holds names unchanged; a terminal would obey control characters in them.
        print("\n".join(map(make_visible, text.split("\n"))))
    else:
        # click.echo would remove what looks like a colour from names.
        print(text)


def print_document(document: Document, style: Format, output: Path | None, *, full_names: bool = False) -> None:
    """Print a result, or write it to a file; its warnings go to standard error too.

    Raises:
        ProfkitError: there is no file, and standard output is closed.
        UsageError: ``--csv-safe`` was given for another format.
        OSError: it cannot be written.
    """
    if wants_safe_csv():
        if style != "csv":
            raise UsageError("--csv-safe is about cells of CSV; add --format csv")
        document = replace(document, csv=without_formulas(document.csv))
    text = render(document, style, full_names=full_names, with_warnings=output is not None)
    # Failures stand at the top of a table, but nobody reads the top of a CSV or JSON.
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
