"""Edits of a program, written as on the command line: what there is, and what each changes; and those that were made.

`whatif` predicts an edit; `try` makes one in a run of the program, where it can, and measures. Edits combine, and
their order does not matter: they are applied in that of `EDITS`.

``trials.jsonl``: edits that profkit made and measured; one object a line. Each call of `profkit try` adds a `TrialPlan`
and behind it, as they come, what is predicted (`TrialPrediction`) and a `TrialProcess` for each process that ran. The
program as it is has no edits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from profkit.errors import RunError, UsageError
from profkit.files import whole_file
from profkit.run import decode, read_lines
from profkit.text_kinds import EditName, GpuName, Message, Moment, SourceLine, Version, Word

_FACTOR = re.compile(r"[x×]?(\d+(\.\d+)?|\d+/\d*[1-9]\d*)$")
_LARGEST_FACTOR = 1024


@dataclass(frozen=True)
class EditSpec:
    """One kind of edit: its name, how it is written, and whether it changes memory; each may change the step's time.

    ``numbers`` says what it may do to the numbers that the program computes, empty if nothing, and ``loss_share`` by
    which share of itself a loss may depart for that reason in some tens of steps; None: by any. ``choices`` are the
    arguments that it has, if it takes no others. ``trying_needs`` is what a program must have so that `try` can make
    the edit, None: `try` cannot. ``code`` is what a person writes to make it, ``{}`` standing for the argument, and
    ``keywords`` what that adds to the call in a line that is known, empty where it is something else.
    """

    name: str
    forms: tuple[str, ...]
    changes_memory: bool = True
    numbers: str = ""
    choices: tuple[str, ...] = ()
    trying_needs: str | None = None
    loss_share: float | None = 0.0
    code: str = ""
    keywords: str = ""

    @property
    def can_be_tried(self) -> bool:
        return self.trying_needs is not None


_ROUNDING = 1e-3
_HALF = 2e-2

EDITS = (
    EditSpec(
        "optimizer",
        ("optimizer:none|sgd|sgd-momentum|adamw-8bit|adamw-fused|offload",),
        numbers="another optimizer learns otherwise",
        choices=("none", "sgd", "sgd-momentum", "adamw-8bit", "adamw-fused", "offload"),
        loss_share=None,
    ),
    EditSpec(
        "optimizer",
        ("optimizer:fused|foreach",),
        numbers="rounding differs",
        choices=("fused", "foreach"),
        trying_needs="an optimizer of torch.optim that takes the keyword",
        loss_share=_ROUNDING,
        code="optimizer = torch.optim.AdamW(…, {}=True)",
        keywords="{}=True",
    ),
    EditSpec("gradients", ("gradients:bf16|offload",), numbers="gradients are rounded to bf16", loss_share=_HALF),
    EditSpec("parameters", ("parameters:bf16",), numbers="all is computed in bf16", loss_share=_HALF),
    EditSpec(
        "checkpoint",
        ("checkpoint:GLOB[:every=K|:group=K][:reentrant]",),
        trying_needs="modules whose names match, none of them compiled",
        code="x = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)  # each module that matches {}",
    ),
    EditSpec(
        "batch",
        ("batch:×F",),
        numbers="gradients are means over another batch",
        trying_needs="a DataLoader that makes batches of a fixed size",
        loss_share=None,
        code="loader = DataLoader(…, batch_size=…)  # {}",
    ),
    EditSpec("loss", ("loss:fused[:chunks=N]",), numbers="rounding differs", loss_share=_ROUNDING),
    EditSpec(
        "zero-grad",
        ("zero-grad:none",),
        choices=("none",),
        trying_needs="a call of zero_grad that sets gradients to zero",
        code="optimizer.zero_grad(set_to_none=True)",
        keywords="set_to_none=True",
    ),
    EditSpec("no-wait", ("no-wait:FILE:LINE",), changes_memory=False),
    EditSpec("no-host", ("no-host:FILE:LINE",), changes_memory=False),
    EditSpec("no-checkpoint", ("no-checkpoint:GLOB",)),
    EditSpec(
        "tf32",
        ("tf32",),
        changes_memory=False,
        numbers="products keep 10 bits of mantissa",
        trying_needs="an NVIDIA GPU of compute capability 8.0 or more",
        loss_share=_ROUNDING,
        code='torch.set_float32_matmul_precision("high")',
    ),
    EditSpec(
        "autocast",
        ("autocast:bf16",),
        numbers="products are computed in bf16",
        choices=("bf16",),
        trying_needs="a model that is called in training, and no autocast of the script's own",
        loss_share=_HALF,
        code='with torch.autocast("cuda", dtype=torch.bfloat16):  # around the forward pass and the loss',
    ),
    EditSpec(
        "channels-last",
        ("channels-last",),
        changes_memory=False,
        numbers="rounding differs",
        trying_needs="convolutions, and inputs of four dimensions",
        loss_share=_ROUNDING,
        code="model.to(memory_format=torch.channels_last)  # inputs likewise",
    ),
    EditSpec(
        "cudnn-benchmark",
        ("cudnn-benchmark",),
        changes_memory=False,
        numbers="rounding differs",
        trying_needs="convolutions on a GPU",
        loss_share=_ROUNDING,
        code="torch.backends.cudnn.benchmark = True",
    ),
    EditSpec(
        "compile",
        ("compile[:default|reduce-overhead|max-autotune|max-autotune-no-cudagraphs]",),
        numbers="rounding differs",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        trying_needs="a model that is called in training and is not compiled",
        loss_share=_ROUNDING,
        code="model = torch.compile(model{})",
    ),
    EditSpec("graphs", ("graphs",)),
    EditSpec(
        "workers",
        ("workers:N",),
        changes_memory=False,
        numbers="random numbers of the data are drawn in other processes",
        trying_needs="a DataLoader over a dataset with indices",
        loss_share=None,
        code="loader = DataLoader(…, num_workers={}, persistent_workers=True)",
        keywords="num_workers={}, persistent_workers=True",
    ),
    EditSpec(
        "pin-memory",
        ("pin-memory",),
        changes_memory=False,
        trying_needs="a DataLoader, and a GPU",
        code="loader = DataLoader(…, pin_memory=True)",
        keywords="pin_memory=True",
    ),
    EditSpec(
        "no-anomaly",
        ("no-anomaly",),
        changes_memory=False,
        trying_needs="a script that turns anomaly detection on",
        code="torch.autograd.set_detect_anomaly(False)",
    ),
    EditSpec(
        "threads",
        ("threads:N",),
        changes_memory=False,
        numbers="rounding differs",
        trying_needs="",
        loss_share=_ROUNDING,
        code="torch.set_num_threads({})",
    ),
    EditSpec(
        "allocator",
        ("allocator:SETTINGS",),
        trying_needs="a GPU",
        code="PYTORCH_CUDA_ALLOC_CONF={}  # in the program's environment",
    ),
    EditSpec("on-time", ("on-time:RANK",), changes_memory=False),
    EditSpec("gpu", ("gpu:×F",), changes_memory=False),
    EditSpec("kernels", ("kernels:GLOB:×F",), changes_memory=False),
    EditSpec("links", ("links:×F",), changes_memory=False),
    EditSpec("cpu", ("cpu:×F",), changes_memory=False),
)
"""In the order in which they are applied."""

FORMS = tuple(form for spec in EDITS for form in spec.forms)


@dataclass(frozen=True)
class Edit:
    """An edit as it was written, and what kind it is."""

    text: str
    argument: str
    spec: EditSpec


def parse_edits(texts: Iterable[str]) -> tuple[Edit, ...]:
    """Return edits in the order in which they are applied.

    Raises:
        UsageError: there is no such edit, or two of them exchange the optimizer.
    """
    edits = [_parse(text) for text in dict.fromkeys(texts)]
    optimizers = [edit.text for edit in edits if edit.spec.name == "optimizer"]
    if len(optimizers) > 1:
        raise UsageError(f"{' and '.join(optimizers)}: a program has one optimizer; give one of these")
    return tuple(sorted(edits, key=lambda edit: (EDITS.index(edit.spec), edit.text)))


def can_be_tried(text: str | None) -> bool:
    """Return whether `profkit try` makes the edit that is written so; None is one without a name, which it cannot."""
    return text is not None and parse_edits([text])[0].spec.can_be_tried


def _parse(text: str) -> Edit:
    name, _, argument = text.partition(":")
    for spec in sorted(EDITS, key=lambda spec: not spec.choices):
        takes_none = spec.forms == (spec.name,)
        is_complete = spec.forms[0].startswith(f"{name}[:") or takes_none == (not argument)
        is_known = not argument or not spec.choices or argument in spec.choices
        if spec.name == name and is_complete and is_known:
            return Edit(text, argument, spec)
    choices = [choice for spec in EDITS if spec.name == name for choice in spec.choices]
    if argument and choices:
        raise UsageError(f"{text}: no {name} {argument!r}; it is one of {', '.join(choices)}")
    raise UsageError(f"no edit {text!r}; edits are {', '.join(FORMS)}")


def read_factor(text: str) -> Fraction:
    """Return the factor that ``×2``, ``x0.5`` or ``1/2`` stands for.

    Raises:
        UsageError: it stands for none, or for one that is too large.
    """
    match = _FACTOR.fullmatch(text)
    factor = Fraction(match[1]) if match else Fraction(0)
    if not 0 < factor <= _LARGEST_FACTOR:
        raise UsageError(f"factor {text!r}: write ×2, x2 or 0.5")
    return factor


VERSION = 1


@dataclass(frozen=True)
class Evidence:
    """Whether an edit took effect in a process: ``text`` says by what that is seen, or why it did not.

    ``place`` is the line of the user's own code that it changes, None if that is not one line, or not known.
    """

    edit: EditName
    is_made: bool
    text: Message
    place: SourceLine | None = None


@dataclass(frozen=True)
class Measured:
    """What one process of the program measured.

    ``steps`` steps took ``step_ns`` each (mean), the GPU waited for before the first and after the last; None if the
    process did not get there: ``reason`` says why, if it knows. ``first_ns`` is what the steps before those took
    together. ``losses`` are the means of the losses of each step, from the first on; None where one is not finite, or
    larger than any that is kept. ``steps_seen`` counts all steps. Peaks are of the whole process, None without a GPU.
    """

    steps: int = 0
    step_ns: float | None = None
    first_ns: int = 0
    steps_seen: int = 0
    losses: tuple[float | None, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    rank: int | None = None
    device: Word | None = None
    gpu: GpuName | None = None
    torch: Version | None = None
    reason: Message | None = None

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why edits were not made, or took no effect."""
        return tuple(f"{evidence.edit}: {evidence.text}" for evidence in self.evidence if not evidence.is_made)


@dataclass(frozen=True)
class TrialPlan:
    """One call of `profkit try`: in each process ``steps`` steps were timed after ``warmup_steps``."""

    version: int
    started_utc: Moment
    warmup_steps: int
    steps: int


@dataclass(frozen=True)
class TrialPrediction:
    """What the step replay predicted of some edits, in nanoseconds a step; None where it says nothing."""

    edits: tuple[EditName, ...]
    now_ns: int | None = None
    low_ns: int | None = None
    expected_ns: int | None = None
    high_ns: int | None = None


@dataclass(frozen=True)
class TrialProcess:
    """One process of the program with some edits.

    Processes of one ``turn`` ran one after another, the program as it is first. ``wall_s`` is how long it took from its
    start to its end. ``reason`` says why nothing was measured, None if something was.
    """

    edits: tuple[EditName, ...]
    turn: int
    wall_s: float
    measured: Measured | None = None
    reason: Message | None = None


@dataclass(frozen=True)
class Trials:
    """What one call of `profkit try` left."""

    plan: TrialPlan
    predictions: tuple[TrialPrediction, ...] = ()
    processes: tuple[TrialProcess, ...] = ()


@dataclass(frozen=True)
class RunTrials:
    """The content of the file: the calls of `profkit try`, the oldest first."""

    calls: tuple[Trials, ...] = field(default_factory=tuple)


def write_trials(path: Path, trials: RunTrials) -> None:
    lines = [line for call in trials.calls for line in _lines(call)]
    with whole_file(path) as partial:
        partial.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def _lines(call: Trials) -> Iterable[dict[str, Any]]:
    yield {"plan": asdict(call.plan)}
    yield from ({"prediction": asdict(prediction)} for prediction in call.predictions)
    yield from ({"process": asdict(process)} for process in call.processes)


def read_trials(path: Path) -> RunTrials:
    """Return the content of the file.

    Raises:
        FileNotFoundError: there is no such file.
        RunError: it cannot be read, or holds something else.
    """
    calls: list[tuple[TrialPlan, list[TrialPrediction], list[TrialProcess]]] = []

    def take(entry: dict[str, Any]) -> None:
        if "plan" in entry:
            plan: TrialPlan = decode(TrialPlan, entry["plan"], "plan")
            if plan.version != VERSION:
                raise RunError(f"{path}: has version {plan.version}, and this profkit reads version {VERSION}")
            calls.append((plan, [], []))
        elif "prediction" in entry:
            calls[-1][1].append(decode(TrialPrediction, entry["prediction"], "prediction"))
        elif "process" in entry:
            calls[-1][2].append(decode(TrialProcess, entry["process"], "process"))

    read_lines(path, take, "a line of trials.jsonl")
    return RunTrials(
        tuple(Trials(plan, tuple(predictions), tuple(processes)) for plan, predictions, processes in calls)
    )
