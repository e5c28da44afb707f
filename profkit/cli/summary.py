"""``profkit summary``: what a run spent its time and memory on."""

from __future__ import annotations

from pathlib import Path

import click

from profkit.analysis.causes.advice import find_advice
from profkit.analysis.summarize import summarize_capture
from profkit.cli.options import capture_argument
from profkit.cli.outputs import Output, output_options, refuse_overwriting, shown_after_a_second
from profkit.reading import open_capture
from profkit.report.commands.summary import build_summary_document


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
