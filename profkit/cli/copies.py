"""``profkit export``, ``gather`` and ``scrub``: copies of captures and runs, for viewers, for `ranks` and to share."""

from __future__ import annotations

from pathlib import Path

import click

from profkit.cli.options import FILE, capture_argument, rank_option
from profkit.cli.outputs import (
    Output,
    format_option,
    print_line,
    quote_path,
    refuse_overwriting,
    shown_after_a_second,
    write_warnings,
)
from profkit.errors import UsageError
from profkit.files import whole_file
from profkit.joining import gather as gather_to
from profkit.reading import open_trace
from profkit.report.document import Format
from profkit.report.export import build_export_document, build_scrub_document, write_chrome_trace
from profkit.report.units import format_count
from profkit.sharing import share


@click.command()
@capture_argument("capture")
@click.option("-o", "--chrome", "output", type=FILE, metavar="FILE.json.gz", help="The trace to write.")
@rank_option
@format_option
def export(capture: Path, output: Path | None, rank: int | None, style: Format) -> None:
    """Write a capture as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

    CAPTURE is a run directory, an nsys export or report, or a torch.profiler trace. The file holds every process and
    rank on one clock: ranges and CUDA calls by thread, kernels by GPU stream with the range they belong to, arrows from
    launch to kernel, and copies. It holds no environment, paths, host or command line; names of ranges and kernels
    stay.
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
    Output(style).print(build_export_document(capture, output, check))


@click.command()
@click.argument("sources", nargs=-1, required=True, type=FILE)
@click.option("-o", "--output", required=True, type=FILE, help="The directory to make.")
def gather(sources: tuple[Path, ...], output: Path) -> None:
    """Put the runs of several machines, copied from their disks, into one directory.

    SOURCES are the run directories of one job's machines, or directories that hold some. Machines that wrote to
    one disk need no gathering. The sources are only read; `profkit ranks OUTPUT` compares all ranks.
    """
    with shown_after_a_second(f"copying {format_count(len(sources), 'run')}"):
        gathered = gather_to(sources, output)
    write_warnings(f"{path}: no file, so it is left out" for path in gathered.left_out)
    held = sum(len(ranks) for _, ranks in gathered.runs)
    missing = ""
    if gathered.expected is not None and gathered.expected > len(gathered.runs):
        missing = f"; the job has {gathered.expected}"
    machines = format_count(len(gathered.runs), "machine")
    print_line(f"{output} holds {format_count(held, 'rank')} of {machines}{missing}.")
    print_line(f"Next:\n  profkit ranks {quote_path(output)}")


@click.command()
@click.argument("source", type=FILE)
@click.option("-o", "--output", required=True, type=FILE, help="The copy to write.")
@click.option("--force", is_flag=True, help="Replace the copy if it exists and is a file.")
@click.option("--keep-frames", is_flag=True, help="Keep the file's name, line and function of source lines.")
@click.option("--rename-ranges", is_flag=True, help="Number the words in names of ranges, modules and tensors.")
@format_option
def scrub(source: Path, output: Path, force: bool, keep_frames: bool, rename_ranges: bool, style: Format) -> None:
    """Copy a capture to share it: numbers, and the names of kernels, operators, ranges and modules.

    SOURCE is an nsys export (.sqlite), a torch.profiler trace, a memory snapshot, or a run directory. It is only read.
    The copy holds what profkit's commands read and nothing else: no environment, command line, message, path or source
    line. The copy of a run directory is a directory too; with -o NAME.sqlite it is the nsys export alone. The command
    prints the names that stay: look whether you wrote into one what nobody should read.
    """
    if source.suffix in (".nsys-rep", ".qdstrm"):
        raise UsageError(
            f"{source}: a report cannot be scrubbed, only its export: run `nsys export --type=sqlite {source}`,"
            " scrub the export, and do not share the report"
        )
    refuse_overwriting([source], [output])
    if output.is_dir() or (output.exists() and not (force and output.is_file())):
        raise UsageError(f"{output}: exists; name another file with -o, or replace a file with --force")
    with shown_after_a_second(f"scrubbing {source.name}"):
        copy = share(source, output, keep_frames=keep_frames, rename_ranges=rename_ranges)
    Output(style).print(build_scrub_document(copy))
