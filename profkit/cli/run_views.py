"""``profkit summary``, ``ranks`` and ``report``: a whole run in a few lines, by rank, and as a page."""

from __future__ import annotations

from pathlib import Path

import click

from profkit.analysis.causes.advice import find_advice
from profkit.analysis.summarize import summarize_capture
from profkit.cli.options import FILE, POSITIVE, capture_argument
from profkit.cli.outputs import Output, output_options, refuse_overwriting, shown_after_a_second
from profkit.errors import UsageError
from profkit.reading import open_capture
from profkit.report.commands.summary import build_summary_document

_DEFAULT_TOP = 16


@click.command()
@capture_argument("capture", "RUN")
@click.option("--all", "with_all", is_flag=True, help="Show every line in full, and all warnings.")
@output_options
def summary(capture: Path, with_all: bool, output: Output) -> None:
    """Say what a run spent its time and memory on, and what to try.

    RUN is a run directory, a trace (.sqlite, .nsys-rep, .json, .json.gz) or a memory snapshot (.pickle, .pickle.gz).

    Each Try names a cause, its line or module, and the step after the change, which is replayed from this run's own
    recording. The time of a step is the unprofiled one if the run measured it.
    """
    refuse_overwriting([capture], [output.path])
    with shown_after_a_second(f"reading {capture.name}"):
        opened = open_capture(capture)
        result = summarize_capture(opened)
        document = build_summary_document(result, find_advice(opened, result), with_all=with_all)
    output.print(document)


@click.command()
@capture_argument("run")
@click.option("--top", type=POSITIVE, metavar="N", help=f"Show at most N ranks (default {_DEFAULT_TOP}).")
@output_options
def ranks(run: Path, top: int | None, output: Output) -> None:
    """Say which rank the others wait for, why, and what each group's communication costs.

    RUN is a run directory of several ranks, a directory that holds one for each node, or one trace of several ranks.
    Each rank is read by itself: from its trace, else from the light record that it left.
    """
    from profkit.joining import read_ranks  # both load what a summary of one rank need not wait for
    from profkit.report.commands.ranks import build_ranks_document

    refuse_overwriting([run], [output.path])
    with shown_after_a_second(f"reading {run.name}"):
        result = read_ranks(run)
    if top is None and output.is_for_people:
        top = _DEFAULT_TOP
    output.print(build_ranks_document(result, str(run), top=top))


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
