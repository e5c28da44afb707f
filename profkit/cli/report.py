"""``profkit report``: one HTML page of a run."""

from __future__ import annotations

from pathlib import Path

import click

from profkit.cli.options import FILE, capture_argument
from profkit.cli.outputs import refuse_overwriting, shown_after_a_second
from profkit.errors import UsageError
from profkit.reading import open_capture


@click.command()
@capture_argument("capture", "RUN")
@click.option("-o", "output", type=FILE, help="The page to write  [default: RUN's name and .html]")
def report(capture: Path, output: Path | None) -> None:
    """Write one HTML page of a run: its steps, modules, kernels and memory, and how far to trust them.

    RUN is a run directory, or a trace or memory snapshot alone. The page is one file that loads nothing: it opens
    without a network, prints, and can be read without JavaScript. It holds no environment, host, user or
    source text. A path begins at the working directory, or is a file's name alone.
    """
    from profkit.report.page.page import render_report, write_page  # loads Jinja2

    output = output or Path(f"{capture.resolve().name}.html")
    if output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"-o {output}: the report is an HTML page; end its name in .html")
    refuse_overwriting([capture], [output])
    with shown_after_a_second(f"reading {capture.name}"):
        page = render_report(open_capture(capture))
    write_page(output, page)
    click.echo(output)
