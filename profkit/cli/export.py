"""``profkit export``: a capture as a Perfetto or Chrome trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import click

from profkit.analysis.memory.opened_snapshot import OpenedSnapshot
from profkit.analysis.opened import OpenedTrace
from profkit.cli.options import format_option, rank_option
from profkit.cli.outputs import print_document, refuse_overwriting
from profkit.cli.progress import shown_after_a_second
from profkit.errors import UsageError
from profkit.files import whole_file
from profkit.reading import kind_of, open_snapshot, open_trace
from profkit.report.commands.export import CHROME, PERFETTO, build_export_document
from profkit.report.document import Format
from profkit.report.export.chrome_trace import write_chrome_trace
from profkit.report.export.layout import find_memory
from profkit.report.export.perfetto import write_perfetto
from profkit.run.directory import Run


@click.command()
@click.argument("capture", type=click.Path(path_type=Path))
@click.option("--perfetto", type=click.Path(path_type=Path), metavar="FILE.pftrace", help="Write a Perfetto trace.")
@click.option("--chrome", type=click.Path(path_type=Path), metavar="FILE.json.gz", help="Write a Chrome trace.")
@rank_option
@format_option
def export(capture: Path, perfetto: Path | None, chrome: Path | None, rank: int | None, style: Format) -> None:
    """Write a capture for a timeline viewer: Perfetto (ui.perfetto.dev) or chrome://tracing.

    CAPTURE is a run directory, an nsys export or report, a torch.profiler trace, or a memory snapshot. The files hold
    every process and rank on one clock: ranges and CUDA calls by thread, kernels by GPU stream with the range they
    belong to, arrows from launch to kernel, copies, why each GPU was idle, and memory by category. They hold no
    environment, paths, host or command line; names of ranges and kernels stay.
    """
    if perfetto is None and chrome is None:
        raise UsageError("nothing to write: add --perfetto step.pftrace, --chrome step.json.gz, or both")
    refuse_overwriting([capture], [perfetto, chrome])
    with shown_after_a_second(f"reading {capture.name}"):
        opened, snapshots = _open(capture, rank)
        memory = find_memory(snapshots)
    files = []
    if perfetto is not None:
        with _written(perfetto) as file:
            write_perfetto(file, opened, memory)
        files.append((perfetto, PERFETTO))
    if chrome is not None:
        with _written(chrome) as file:
            write_chrome_trace(file, opened, memory, zipped=chrome.suffix == ".gz")
        files.append((chrome, PERFETTO if opened is None else CHROME))
    print_document(build_export_document(capture, files, opened, memory), style, None)


@contextmanager
def _written(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that appears at ``path`` when it is whole."""
    with shown_after_a_second(f"writing {path.name}"), whole_file(path) as partial, partial.open("xb") as file:
        yield file


def _open(capture: Path, rank: int | None) -> tuple[OpenedTrace | None, dict[int | None, OpenedSnapshot]]:
    """Return the trace and each rank's snapshot, as far as the capture has them; the rank of a lone one is None."""
    if not capture.is_dir():
        if capture.exists() and kind_of(capture) == "snapshot":
            return None, {None: open_snapshot(capture, rank=rank)}
        return open_trace(capture, rank=rank), {}
    run = Run(capture)
    ranks = [one for one in run.snapshots if rank in (None, one)]
    trace = open_trace(capture, rank=rank) if run.traces or not ranks else None
    return trace, {one if len(run.snapshots) > 1 else None: open_snapshot(capture, rank=one) for one in ranks}
