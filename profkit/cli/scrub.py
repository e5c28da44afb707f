"""``profkit scrub``: a copy to share."""

from __future__ import annotations

from pathlib import Path

import click

from profkit.cli.options import FILE
from profkit.cli.outputs import Output, format_option, refuse_overwriting, shown_after_a_second
from profkit.errors import UsageError
from profkit.report.commands.copies import build_scrub_document
from profkit.report.document import Format
from profkit.sharing import share


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
