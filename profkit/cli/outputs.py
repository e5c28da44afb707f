"""What a command prints or writes, what it shows meanwhile, and which files it must never overwrite."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, TextIO

import click

from profkit.cli.options import FILE, together
from profkit.errors import ProfkitError, UsageError
from profkit.files import write_whole
from profkit.report import make_visible
from profkit.report.document import FORMATS, Document, Format, Role, plainly, render, without_formulas
from profkit.run.directory import MANIFEST, Run, find_run

_PATIENCE_S = 1.0

_STYLES: dict[Role, dict[str, Any]] = {
    "title": {"bold": True},
    "heading": {"bold": True},
    "rule": {"dim": True},
    "wrong": {"fg": "red"},
}

format_option = click.option("--format", "style", type=click.Choice(FORMATS), default="table", show_default=True)


@dataclass(frozen=True)
class Output:
    """Where a command's result goes, and in which form."""

    style: Format
    path: Path | None = None
    full_names: bool = False
    is_csv_safe: bool = False

    @property
    def is_for_people(self) -> bool:
        """Whether it is rounded and may be cut; CSV and JSON hold all that there is."""
        return self.style not in ("csv", "json")

    def print(self, document: Document) -> None:
        """Print a result, or write it to the file; its warnings go to standard error too."""
        if self.is_csv_safe:
            if self.style != "csv":
                raise UsageError("--csv-safe is about cells of CSV; add --format csv")
            document = replace(document, csv=without_formulas(document.csv))
        has_file = self.path is not None
        paint = _colour if not has_file and self.style == "table" and has_colours(sys.stdout) else plainly
        text = render(document, self.style, full_names=self.full_names, with_warnings=has_file, paint=paint)
        # Failures stand at the top of a table, but nobody reads the top of a CSV or JSON.
        shown = document.warnings if self.is_for_people else [*document.failures, *document.warnings]
        write_warnings(finding.message for finding in shown)
        if paint is _colour:
            print(text)  # every name in it is visible already, and the colours must stay
        else:
            write_result(text, self.path)


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--format``, ``-o``, ``--full-names`` and ``--csv-safe``, as the parameter ``output`` (an `Output`)."""

    @wraps(command)
    def with_output(*, style: Format, path: Path | None, full_names: bool, is_csv_safe: bool, **options: Any) -> Any:
        return command(output=Output(style, path, full_names, is_csv_safe), **options)

    return _output_options(with_output)


_output_options = together(
    format_option,
    click.option("-o", "--output", "path", type=FILE, help="Write the result to this file."),
    click.option("--full-names", is_flag=True, help="Do not shorten names, or paths in JSON."),
    click.option(
        "--csv-safe",
        "is_csv_safe",
        is_flag=True,
        help="In CSV, put ' before text that a spreadsheet would take for a formula.",
    ),
)


def refuse_overwriting(captures: Iterable[Path | None], outputs: Iterable[Path | None]) -> None:
    """Refuse outputs that would overwrite a capture that is read, a file of its run, or another output.

    Every analyzer calls this before it reads or writes anything; links to the same file count as that file. Of a
    capture whose run was cut off it warns: what can be read is what was there by then.
    """
    read = [capture for capture in captures if capture is not None]
    named = [output for output in outputs if output is not None]
    for capture, output in itertools.product(read, named):
        folder = capture if capture.is_dir() else capture.parent
        files = Run(folder).files if (folder / MANIFEST).exists() else []
        if any(_is_same(output, path) for path in (capture, *files)):
            raise UsageError(f"{output}: this file is being read, or belongs to the run that is; write to another file")
    for first, second in itertools.combinations(named, 2):
        if _is_same(first, second):
            raise UsageError(f"{second}: two results would be written to this file")
    write_warnings(filter(None, map(_how_cut_off, read)))


def _is_terminal(output: Path) -> bool:
    if not output.is_char_device():
        return False
    descriptor = os.open(output, os.O_WRONLY | os.O_NOCTTY)
    try:
        return os.isatty(descriptor)
    finally:
        os.close(descriptor)


def write_result(text: str, output: Path | None) -> None:
    """Print the result, or write it to a file, which appears whole or not at all.

    Raises:
        ProfkitError: there is no file, and standard output is closed.
        OSError: it cannot be written.
    """
    if output is None and sys.stdout is None:
        raise ProfkitError("standard output is closed; name a file with -o")
    if sys.stdout.isatty() if output is None else _is_terminal(output):
        # CSV holds names unchanged; a terminal would obey control characters in them.
        text = "\n".join(map(make_visible, text.split("\n")))
    if output is not None:
        write_whole(output, (text + "\n").encode("utf-8", "replace"))
    else:
        # click.echo would remove what looks like a colour from names.
        print(text)


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


def has_colours(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal with colours that nobody switched off (https://no-color.org)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream is not None and stream.isatty() and not plain


def _colour(text: str, role: Role) -> str:
    """Return text for a terminal; red means that something is wrong, and nothing else is red."""
    return click.style(text, **_STYLES[role])


def write_warnings(messages: Iterable[str]) -> None:
    for message in messages:
        _write_error(f"warning: {message}")


def keep_to_the_end(many_objects: object) -> None:
    """Keep what it would take long to free, if this process ends after the command: it then ends at once."""
    kept: list[object] | None = click.get_current_context().obj
    if kept is not None:
        kept.append(many_objects)


def say(line: str) -> None:
    _write_error(f"profkit: {line}")


def print_line(text: str) -> None:
    """Print a part of a result to standard output; if that fails, say so once and let the command go on."""
    try:
        click.echo(text)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        discard_output()
        if not isinstance(error, BrokenPipeError):
            say(f"the result could not be printed: {error.strerror}")


def discard_output() -> None:
    """Send what is still to be printed nowhere: the interpreter would try again at its exit, and fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def quote_path(path: Path) -> str:
    """Return a path as a person can type it at a shell's prompt, whatever its name holds."""
    text = str(path)
    if not text.isprintable():  # a control character, or what is not UTF-8
        escaped = "".join(
            chr(byte) if chr(byte).isascii() and (chr(byte).isalnum() or byte in b"/._-") else f"\\x{byte:02x}"
            for byte in os.fsencode(text)
        )
        return f"$'{escaped}'"
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def _write_error(line: str) -> None:
    # Where the terminal is gone, or the disk under a log full, nobody can be told, and the command goes on.
    with suppress(OSError):
        click.echo(make_visible(line), err=True)


def _how_cut_off(capture: Path) -> str | None:
    try:
        run = find_run(capture)
        if run is None or run.manifest.status != "incomplete":
            return None
    except ProfkitError:  # whoever reads it says what is wrong
        return None
    there = ", ".join(path.name for path in (*run.traces, *run.snapshots.values()))
    return there and f"{run.path}: it holds what was written by then ({there}): {run.ending}"


def _is_same(path: Path, other: Path) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return os.path.realpath(path) == os.path.realpath(other)  # a link to itself has no file
