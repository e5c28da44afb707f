"""``profkit ceilings``: what this machine's GPU, the links between GPUs, and the network can do at most."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

import click

from profkit.cli.options import format_option
from profkit.cli.outputs import print_document
from profkit.cli.progress import shown_after_a_second
from profkit.errors import RunError, UsageError
from profkit.launch.ceilings import measure_ceilings, measure_job
from profkit.launch.record import require_torch
from profkit.models.options import Device
from profkit.report.commands.ceilings import build_ceilings_document
from profkit.report.document import Format
from profkit.run.ceilings import Ceilings, write_ceilings
from profkit.run.directory import Run
from profkit.run.job import CEILINGS, JOB, launched_rank


@click.command()
@click.option(
    "--device",
    type=click.Choice(get_args(Device)),
    default="auto",
    show_default=True,
    help="auto: CUDA if there is a GPU, otherwise the CPU.",
)
@click.option(
    "-o",
    "output",
    type=click.Path(path_type=Path),
    help=f"Also write to this file, or to {CEILINGS} of this run or job.",
)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    metavar="N",
    help="Measure the links with N processes, one a GPU (default: as many as there are GPUs; 1: leave it out).",
)
@format_option
def ceilings(device: Device, output: Path | None, ranks: int | None, style: Format) -> None:
    """Measure this machine's peaks: matrix products in fp32, TF32, BF16 and FP16, a memory copy, and the GPUs' links.

    It takes some seconds and needs the GPUs for itself. The table also shows what NVIDIA's datasheet says of that GPU.
    With several GPUs it runs collectives of 1 KiB to 1 GiB over NCCL; `profkit ranks RUN` holds a run's against them.

    Started by a job's launcher, one process a GPU, it measures the network between the machines too:

        torchrun --nnodes 4 … -m profkit ceilings -o /shared/run7
    """
    require_torch()
    rank = launched_rank(os.environ)
    if rank and ranks is not None:
        raise UsageError("--ranks starts processes, and a launcher started this one; leave it out")
    if output is not None and output.is_dir() and not (output / JOB).exists():
        Run(output)
    if rank:
        measured = measure_job(device, rank)
        if measured is None:
            return
        _write(output, measured)
    else:
        measured = measure_to(output, device, ranks)
    print_document(build_ceilings_document(measured), style, None)


def measure_to(output: Path | None, device: Device, ranks: int | None) -> Ceilings:
    """Measure, keep the result in ``output`` (a file or a run directory) if one is named, and return it.

    ``ranks`` processes measure the links between GPUs: by default one a GPU, below 2 none.
    """
    with shown_after_a_second("measuring what the device can do"):
        measured = measure_ceilings(device, ranks)
    _write(output, measured)
    return measured


def _write(output: Path | None, measured: Ceilings) -> None:
    if output is None:
        return
    path = output / CEILINGS if output.is_dir() else output
    try:
        write_ceilings(path, measured)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}; name another file with -o") from None
