"""``profkit export``: a timeline for a viewer."""

from __future__ import annotations

from pathlib import Path

import click

from profkit.analysis.memory.opened_snapshot import OpenedSnapshot
from profkit.analysis.opened import OpenedTrace
from profkit.cli.options import FILE, capture_argument, rank_option
from profkit.cli.outputs import Output, format_option, refuse_overwriting, shown_after_a_second
from profkit.errors import UsageError
from profkit.files import whole_file
from profkit.reading import kind_of, open_snapshot, open_trace
from profkit.report.chrome_layout import find_memory
from profkit.report.chrome_trace import write_chrome_trace
from profkit.report.commands.copies import build_export_document
from profkit.report.document import Format
from profkit.run.directory import Run


@click.command()
@capture_argument("capture")
@click.option("-o", "--chrome", "output", type=FILE, metavar="FILE.json.gz", help="The trace to write.")
@rank_option
@format_option
def export(capture: Path, output: Path | None, rank: int | None, style: Format) -> None:
    """Write a capture as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

    CAPTURE is a run directory, an nsys export or report, a torch.profiler trace, or a memory snapshot. The file holds
    every process and rank on one clock: ranges and CUDA calls by thread, kernels by GPU stream with the range they
    belong to, arrows from launch to kernel, copies, why each GPU was idle, and memory by category. It holds no
    environment, paths, host or command line; names of ranges and kernels stay.
    """
    if output is None:
        raise UsageError("nothing to write: add -o step.json.gz")
    refuse_overwriting([capture], [output])
    with shown_after_a_second(f"reading {capture.name}"):
        opened, snapshots = _open(capture, rank)
        memory = find_memory(snapshots)
        # Before anything is written: it reads the run's log, which may be no file.
        check = None if opened is None else opened.self_check
    with shown_after_a_second(f"writing {output.name}"), whole_file(output) as partial, partial.open("xb") as file:
        write_chrome_trace(file, opened, memory, zipped=output.suffix == ".gz")
    Output(style).print(build_export_document(capture, output, opened, memory, check))


def _open(capture: Path, rank: int | None) -> tuple[OpenedTrace | None, dict[int | None, OpenedSnapshot]]:
    """Return the trace and each rank's snapshot, as far as the capture has them; the rank of a lone one is None."""
    if not capture.is_dir():
        if capture.exists() and kind_of(capture) == "snapshot":
            return None, {None: open_snapshot(capture, rank=rank)}
        return open_trace(capture, rank=rank), {}
    run = Run(capture)
    ranks = [number for number in run.snapshots if rank in (None, number)]
    trace = open_trace(capture, rank=rank) if run.traces or not ranks else None
    return trace, {number if len(run.snapshots) > 1 else None: open_snapshot(capture, rank=number) for number in ranks}
