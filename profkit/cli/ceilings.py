"""``profkit ceilings``: what this machine's GPU, and the links between its GPUs, can do at most."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from profkit.cli.outputs import print_document
from profkit.cli.progress import shown_after_a_second
from profkit.errors import RunError
from profkit.launch.ceilings import measure_ceilings
from profkit.launch.record import require_torch
from profkit.models.options import Device
from profkit.report.ceilings import build_ceilings_document
from profkit.report.document import FORMATS, Format
from profkit.run.ceilings import Ceilings, write_ceilings
from profkit.run.directory import CEILINGS, Run


@click.command()
@click.option(
    "--device",
    type=click.Choice(get_args(Device)),
    default="auto",
    show_default=True,
    help="auto: CUDA if there is a GPU, otherwise the CPU.",
)
@click.option(
    "-o", "output", type=click.Path(path_type=Path), help=f"Also write to this file, or to {CEILINGS} of this run."
)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    metavar="N",
    help="Measure the links with N processes, one a GPU (default: as many as there are GPUs; 1: leave it out).",
)
@click.option("--format", "style", type=click.Choice(FORMATS), default="table", show_default=True)
def ceilings(device: Device, output: Path | None, ranks: int | None, style: Format) -> None:
    """Measure this machine's peaks: matrix products in fp32, TF32, BF16 and FP16, a memory copy, and the GPUs' links.

    It takes some seconds and needs the GPUs for itself. The table also shows what NVIDIA's datasheet says of that GPU.
    With several GPUs it runs collectives of 1 KiB to 1 GiB over NCCL; `profkit ranks RUN` holds a run's against them.
    """
    require_torch()
    if output is not None and output.is_dir():
        Run(output)
    measured = measure_to(output, device, ranks)
    print_document(build_ceilings_document(measured), style, None)


def measure_to(output: Path | None, device: Device, ranks: int | None) -> Ceilings:
    """Measure, keep the result in ``output`` (a file or a run directory) if one is named, and return it.

    ``ranks`` processes measure the links between GPUs: by default one a GPU, below 2 none.
    """
    with shown_after_a_second("measuring what the device can do"):
        measured = measure_ceilings(device, ranks)
    if output is not None:
        path = output / CEILINGS if output.is_dir() else output
        try:
            write_ceilings(path, measured)
        except OSError as error:
            raise RunError(f"{path}: {error.strerror}; name another file with -o") from None
    return measured
