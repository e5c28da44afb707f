"""``profkit ceilings``: the peaks of this machine's GPU."""

from __future__ import annotations

from pathlib import Path

import click

from profkit.cli.options import FILE
from profkit.cli.outputs import Output, format_option, shown_after_a_second
from profkit.errors import RunError
from profkit.launch.gpu_state import measure_ceilings
from profkit.launch.record import require_torch
from profkit.report.commands.machine import build_ceilings_document
from profkit.report.document import Format
from profkit.run.directory import CEILINGS, Run
from profkit.run.work import write_ceilings


@click.command()
@click.option(
    "-o",
    "output",
    type=FILE,
    help=f"Also write to this file, or to {CEILINGS} of this run.",
)
@format_option
def ceilings(output: Path | None, style: Format) -> None:
    """Measure this machine's peaks: matrix products in fp32, TF32, BF16 and FP16, and a memory copy.

    It takes some seconds and needs the GPU for itself. The table also shows what NVIDIA's datasheet says of that GPU.
    """
    require_torch()
    if output is not None and output.is_dir():
        Run(output)
    with shown_after_a_second("measuring what the GPU can do"):
        measured = measure_ceilings()
    if output is not None:
        path = output / CEILINGS if output.is_dir() else output
        try:
            write_ceilings(path, measured)
        except OSError as error:
            raise RunError(f"{path}: {error.strerror}; name another file with -o") from None
    Output(style).print(build_ceilings_document(measured))
