"""``profkit scrub``: a copy of an nsys export that can be shared."""

from __future__ import annotations

from pathlib import Path

import click

from profkit.cli.outputs import refuse_overwriting, write_result, write_warnings
from profkit.cli.progress import shown_after_a_second
from profkit.errors import UsageError
from profkit.report.document import FORMATS, Format
from profkit.report.scrub import kept_warnings, render_scrub
from profkit.run.directory import Run
from profkit.trace.scrub import scrub_export

_REPORTS = (".nsys-rep", ".qdrep", ".qdstrm")


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The copy to write.")
@click.option("--force", is_flag=True, help="Replace the copy if it exists.")
@click.option("--format", "style", type=click.Choice(FORMATS), default="table", show_default=True)
def scrub(trace: Path, output: Path, force: bool, style: Format) -> None:
    """Copy an nsys export without environment, host and user name, paths, command line, and other processes.

    TRACE is an nsys export (.sqlite) or a run directory. It is only read; the recorded events are the same in the
    copy. What was taken is printed. Names of ranges stay: what you wrote into them is yours to judge.
    """
    source = Run(trace).find_trace() if trace.is_dir() else trace
    if source.suffix in _REPORTS:
        raise UsageError(
            f"{source}: a report cannot be scrubbed, its format is nsys' own; export it"
            " (`nsys export --type=sqlite`), scrub the export, and do not share the report"
        )
    refuse_overwriting([trace, source], [output])
    if output.is_dir() or (output.exists() and not (force and output.is_file())):
        raise UsageError(f"{output}: exists; name another file with -o, or replace a file with --force")
    with shown_after_a_second(f"scrubbing {source.name}"):
        result = scrub_export(source, output)
    write_warnings(kept_warnings(result))
    write_result(render_scrub(result, style), None)
