"""``profkit whatif`` and ``profkit try``: what changes would do to time and memory, predicted, or made and measured."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import click

from profkit.analysis.step_replay.predict import Prediction
from profkit.analysis.trials import latest_trials, summarize_trials
from profkit.analysis.whatif.apply import Cost, cost_of_ranges
from profkit.cli.options import POSITIVE, SIZE, capture_argument, peak_options
from profkit.cli.outputs import Output, output_options, quote_path, refuse_overwriting, say, shown_after_a_second
from profkit.cli.run import run as run_command
from profkit.cli.run_options import RunCommand
from profkit.errors import ProfkitError, RunError, UsageError
from profkit.files import collector_off
from profkit.launch.manifest import REDACTED, begin_manifest, utc_now
from profkit.launch.passes import Pass, Target, command_name, target_kind
from profkit.launch.trials import TrialOptions, TrialRunner
from profkit.reading import is_time_alone, open_capture, open_snapshot, open_trace
from profkit.report.commands.edits import build_held_document, build_prediction_document, build_trials_document
from profkit.report.document import Document
from profkit.run.directory import MANIFEST, TRIALS, Run, find_newest_run, make_run_directory
from profkit.run.edits import (
    EDITS,
    FORMS,
    TrialPrediction,
    TrialProcess,
    Trials,
    can_be_tried,
    parse_edits,
    write_trials,
)
from profkit.run.manifest import Workload, write_manifest
from profkit.run.recording import Order


@click.command()
@capture_argument("capture", "RUN")
@click.option(
    "--allocator",
    "allocators",
    multiple=True,
    metavar="SETTINGS",
    help="Settings to try, as in PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True,max_split_size_mb:128.",
)
@click.option(
    "--edit",
    "edits",
    multiple=True,
    metavar="EDIT",
    help="Change the program; several are applied together: "
    + ", ".join(FORMS)
    + ". `profkit help whatif` explains them.",
)
@click.option("--fit", type=SIZE, metavar="SIZE", help="Search for the cheapest edits that fit, such as 24GiB.")
@click.option(
    "--capacity",
    type=SIZE,
    help="Memory that PyTorch may reserve, such as 24GiB (default: that of the recorded GPU).",
)
@peak_options
@output_options
def whatif(
    capture: Path,
    allocators: tuple[str, ...],
    edits: tuple[str, ...],
    fit: int | None,
    capacity: int | None,
    device: int | None,
    rank: int | None,
    output: Output,
) -> None:
    """Predict a step's time and the peak of memory after changes of the program, or under other allocator settings.

    RUN is a run directory, a trace (time alone) or a memory snapshot (memory alone). Of time, a recorded step is run
    again with the change, once it has reproduced its own recording. Of memory, profkit simulates the allocator on the
    recorded requests; with the recorded settings it must choose every recorded address.
    """
    if fit is not None and (edits or allocators or capacity is not None):
        raise UsageError("--fit searches by itself: leave out --edit, --allocator and --capacity")
    refuse_overwriting([capture], [output.path])
    with shown_after_a_second(f"reading {capture.name}"):
        opened = open_capture(capture, rank=rank) if edits else None
        if opened is None and is_time_alone(capture):
            raise UsageError(
                f"{capture}: holds no memory snapshot (`profkit run --memory` records one); a step's time is predicted"
                " with --edit"
            )
        snapshot = open_snapshot(capture, rank=rank) if opened is None else None
    with shown_after_a_second("replaying the step, simulating the allocator"):
        if opened is not None:
            predicted = opened.whatif(edits, allocators=allocators, device=device, capacity_bytes=capacity)
        else:
            assert snapshot is not None
            memory = snapshot.whatif(
                allocators=allocators,
                fit=fit is not None,
                device=device,
                capacity_bytes=fit or capacity,
                cost=_cost_of(capture) if fit else None,
            )
            predicted = Prediction(None, memory)
    output.print(build_prediction_document(predicted))


def _cost_of(path: Path) -> Cost | None:
    if not path.is_dir():
        return None
    try:
        return cost_of_ranges(open_trace(path).ranges())
    except ProfkitError:
        return None


_MEASURED = tuple(spec.form or spec.name for spec in EDITS if spec.can_be_tried)
"""The forms of the edits that `profkit try` makes."""


class TryCommand(RunCommand):
    """All that follows a script is the script's; the help shows every option."""

    format_options = click.Command.format_options

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; an edit behind a script, which was surely not meant for the script, is refused."""
        at = self.first_word(args)
        if at < len(args) and args[at].endswith(".py") and "--edit" in args[at:]:
            script = args[at]
            raise UsageError(
                f"--edit stands behind {script}, whose option it would be: write profkit try --edit … {script}; "
                f"if {script} has such an option, write profkit try … -- python {script} --edit …"
            )
        return super().parse_args(ctx, args)


@click.command(
    cls=TryCommand,
    name="try",
    epilog="TARGET is a run that `profkit run` made, whose command is run again; or a script with its arguments "
    "(train.py --lr 1e-3); or, after --, any command that starts Python (-- torchrun --nproc-per-node 2 train.py). "
    "`profkit help try` explains what is made, how it is proven, and what forbids it.",
)
@click.argument("target", nargs=-1)
@click.option(
    "--edit",
    "edits",
    multiple=True,
    metavar="EDIT",
    help=f"Try this; given several times, each alone and then those that help together: {', '.join(_MEASURED)}.",
)
@click.option("--alone", is_flag=True, help="Try each edit alone only, not those together that help.")
@click.option("--processes", type=POSITIVE, default=3, show_default=True, help="Processes of each that are measured.")
@click.option("--anyway", is_flag=True, help="Also try a script that writes files where it runs.")
@click.option("--step-on", metavar="KIND", help="What a step is, as for `profkit run`.")
@click.option("--run", "directory", type=click.Path(path_type=Path), help="The run directory to create for a script.")
@click.option(
    "--report",
    is_flag=True,
    help="Try nothing: show what a run's last trials measured; of several runs, how often predictions held.",
)
@output_options
def try_(
    target: tuple[str, ...],
    edits: tuple[str, ...],
    alone: bool,
    processes: int,
    anyway: bool,
    step_on: str | None,
    directory: Path | None,
    report: bool,
    output: Output,
) -> int:
    """Make edits in runs of a program, without changing it, and measure what each does to a step.

    Without --edit it tries what the summary proposes; a script is recorded for that first, as by `profkit run --stop`.
    Each edit gets processes of its own, in turns with the program as it is, which are stopped after some timed steps.
    Nothing is recorded meanwhile. An edit that was not made, or that took no effect, is shown with the reason.
    """
    if report:
        output.print(_report(list(map(Path, target))))
        return 0
    run, argv = _read_target(target)
    refuse_overwriting([run], [output.path])
    if run is None and not edits:
        run = _record(argv, directory)
    wanted = edits or (_find_tries(run) if run is not None else ())
    if not wanted:
        raise UsageError(
            f"the summary of {run} proposes nothing that can be tried; --edit takes {', '.join(_MEASURED)}"
        )
    variants = [(text,) for text in parse_each(wanted)]
    step_on = step_on or (Run(run).manifest.step_on if run is not None else None)
    options = TrialOptions(processes, step_on, combines=not alone, may_write=anyway)
    status, run, trials = _measure(run, argv, options, variants, directory)
    if any(process.reason is None for process in trials.processes):
        document = build_trials_document(str(run), trials.plan, summarize_trials(trials), with_source=True)
        output.print(document)
    else:
        say("; ".join(dict.fromkeys(process.reason or "" for process in trials.processes)) or "nothing was measured")
        status = status or 1
    say(f"kept in {quote_path(run / TRIALS)}")
    return status


def parse_each(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the edits as they are written, each once; UsageError if one is unknown, or predicted only."""
    for text in texts:
        (edit,) = parse_edits([text])
        if not edit.spec.can_be_tried:
            code = f"; make it yourself: {edit.spec.code}" if edit.spec.code else ""
            raise UsageError(f"{text}: profkit does not make this edit, `profkit whatif` predicts it{code}")
    return tuple(dict.fromkeys(texts))


def _read_target(target: Sequence[str]) -> tuple[Path | None, tuple[str, ...]]:
    first = Path(target[0]) if target else find_newest_run(Path())
    if first is None:
        raise UsageError("name a run, or a script: profkit try --edit compile train.py")
    if not target:
        say(f"{first} is the newest complete run here")
    is_run = first.is_dir() and (first / MANIFEST).exists()
    argv = tuple(target[1:] if is_run else target)
    if is_run and not argv:
        argv = _command_of(Run(first))
    if target_kind(argv) != "command":
        raise UsageError(f"{argv[0]}: try takes a run, a script, or a command after --")
    return (first if is_run else None), argv


def _command_of(run: Run) -> tuple[str, ...]:
    manifest = run.manifest
    if manifest.kind != "command":
        raise UsageError(f"{run.path}: this is a run of {manifest.target}; edits can be tried in a script's run alone")
    if any(REDACTED in word for word in manifest.argv):
        raise UsageError(f"{run.path}: its command holds secrets, which are not kept; name it again after --")
    return tuple(manifest.argv)


def _record(argv: tuple[str, ...], directory: Path | None) -> Path:
    place = make_run_directory(directory, command_name(argv))
    context = click.get_current_context()
    status = context.invoke(run_command, target=argv, output=place, stop=True)
    if status:
        context.exit(status)
    return place


def _find_tries(run: Path) -> tuple[str, ...]:
    from profkit.analysis.causes.advice import find_advice
    from profkit.analysis.summarize import summarize_capture

    with shown_after_a_second(f"reading {run.name}"), collector_off():
        opened = open_capture(run)
        proposed = [advice.edit for advice in find_advice(opened, summarize_capture(opened)).tries]
    return tuple(text for text in proposed if text is not None and can_be_tried(text))


def _predict(run: Path, variants: Sequence[tuple[str, ...]]) -> tuple[TrialPrediction, ...]:
    try:
        with shown_after_a_second("replaying the step"), collector_off():
            trace = open_capture(run).trace
            answers = [] if trace is None else [(edits, trace.predict_time(parse_edits(edits))) for edits in variants]
    except ProfkitError as error:
        say(f"nothing is predicted: {error}")
        return ()
    return tuple(
        TrialPrediction(edits, answer.now_ns, answer.low_ns, answer.expected_ns, answer.high_ns)
        for edits, answer in answers
        if answer.refusal is None
    )


def _measure(
    run: Path | None,
    argv: tuple[str, ...],
    options: TrialOptions,
    variants: Sequence[tuple[str, ...]],
    directory: Path | None,
) -> tuple[int, Path, Trials]:
    """Without a run a new directory is made, which is gone again if nothing can be tried."""
    place = make_run_directory(directory, command_name(argv)) if run is None else run
    runner = TrialRunner(argv, place, options, progress=shown_after_a_second, say=say)
    try:
        plan = runner.plan(len(variants))
    except BaseException:
        if run is None:
            with suppress(OSError):  # what went wrong first is what a person must know
                place.rmdir()
        raise
    if run is None:
        _write_manifest(place, argv)
    before, measured = Run(place).trials, list[TrialProcess]()

    def keep(process: TrialProcess) -> None:
        measured.append(process)
        write_trials(place / TRIALS, (*before, Trials(plan, (), tuple(measured))))

    status = 0
    try:
        runner.run(variants, keep)
    except KeyboardInterrupt:
        status = 130
    tried = list(dict.fromkeys(process.edits for process in measured if process.edits))
    trials = Trials(plan, () if run is None else _predict(run, tried), tuple(measured))
    write_trials(place / TRIALS, (*before, trials))
    return status, place, trials


def _write_manifest(run: Path, argv: tuple[str, ...]) -> None:
    passes = (Pass(argv, Order("", "none", 0, None)),)
    target = Target(command_name(argv), "command", passes, Workload(), argv=argv)
    manifest = begin_manifest(target, None, ["profkit", *sys.argv[1:]], ())
    complete = replace(manifest, status="complete", profiler=None, finished_utc=utc_now())
    try:
        write_manifest(run / MANIFEST, complete, is_first=True)
    except OSError as error:
        raise RunError(f"{run / MANIFEST}: {error.strerror}") from None


def _report(runs: Sequence[Path]) -> Document:
    if len(runs) == 1 and (calls := Run(runs[0]).trials):
        return build_trials_document(str(runs[0]), calls[-1].plan, summarize_trials(calls[-1]), with_source=True)
    trials = [(run.name, trial) for run in runs for trial in latest_trials(Run(run).trials).values()]
    if not trials:
        raise UsageError("these runs hold no trials; `profkit try RUN` makes some")
    return build_held_document(trials)
