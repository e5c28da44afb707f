"""``profkit export``: a timeline for a viewer."""

from __future__ import annotations

from pathlib import Path

import click

from profkit.cli.options import FILE, capture_argument, rank_option
from profkit.cli.outputs import Output, format_option, refuse_overwriting, shown_after_a_second
from profkit.errors import UsageError
from profkit.files import whole_file
from profkit.reading import open_trace
from profkit.report.commands.copies import build_export_document
from profkit.report.document import Format
from profkit.report.export import write_chrome_trace


@click.command()
@capture_argument("capture")
@click.option("-o", "--chrome", "output", type=FILE, metavar="FILE.json.gz", help="The trace to write.")
@rank_option
@format_option
def export(capture: Path, output: Path | None, rank: int | None, style: Format) -> None:
    """Write a capture as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

    CAPTURE is a run directory, an nsys export or report, or a torch.profiler trace. The file holds every process and
    rank on one clock: ranges and CUDA calls by thread, kernels by GPU stream with the range they belong to, arrows from
    launch to kernel, copies, and why each GPU was idle. It holds no environment, paths, host or command line; names of
    ranges and kernels stay.
    """
    if output is None:
        raise UsageError("nothing to write: add -o step.json.gz")
    refuse_overwriting([capture], [output])
    with shown_after_a_second(f"reading {capture.name}"):
        opened = open_trace(capture, rank=rank)
        # Before anything is written: it reads the run's log, which may be no file.
        check = opened.self_check
    with shown_after_a_second(f"writing {output.name}"), whole_file(output) as partial, partial.open("xb") as file:
        write_chrome_trace(file, opened, zipped=output.suffix == ".gz")
    Output(style).print(build_export_document(capture, output, opened, check))
