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
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from profkit.errors import RunError, UsageError
from profkit.files import whole_file
from profkit.run import decode, read_lines
from profkit.text_kinds import EditName, GpuName, Message, Moment, SourceLine, Version, Word

_FACTOR = re.compile(r"[x×]?(\d+(\.\d+)?|\d+/\d*[1-9]\d*)$")
_LARGEST_FACTOR = 1024


class Numbers(NamedTuple):
    """What an edit may do to the numbers that a program computes, in words; empty: nothing.

    A loss may depart by ``loss_share`` of itself for that reason in some tens of steps; None: by any.
    """

    change: str
    loss_share: float | None


_SAME, _ROUNDED = Numbers("", 0.0), Numbers("rounding differs", 1e-3)
_HALF = 2e-2


@dataclass(frozen=True)
class EditSpec:
    """One kind of edit: its name, how it is written, and whether it changes memory; each may change the step's time.

    ``form`` is how it is written, empty if that is its name alone. ``numbers`` is what it may do to the numbers
    that the program computes. ``choices`` are its arguments, if it takes no others. ``trying_needs`` is what a
    program must have so that `try` can make the edit, None: `try` cannot. ``code`` is what a person writes to make
    it, ``{}`` standing for the argument, and ``keywords`` what that adds to the call in a line that is known, empty
    where it is something else.
    """

    name: str
    form: str = ""
    changes_memory: bool = True
    numbers: Numbers = _SAME
    choices: tuple[str, ...] = ()
    trying_needs: str | None = None
    code: str = ""
    keywords: str = ""

    @property
    def can_be_tried(self) -> bool:
        return self.trying_needs is not None


EDITS = (
    EditSpec(
        "optimizer",
        "optimizer:none|sgd|sgd-momentum|adamw-8bit|adamw-fused|offload",
        numbers=Numbers("another optimizer learns otherwise", None),
        choices=("none", "sgd", "sgd-momentum", "adamw-8bit", "adamw-fused", "offload"),
    ),
    EditSpec(
        "optimizer",
        "optimizer:fused|foreach",
        numbers=_ROUNDED,
        choices=("fused", "foreach"),
        trying_needs="an optimizer of torch.optim that takes the keyword",
        code="optimizer = torch.optim.AdamW(…, {}=True)",
        keywords="{}=True",
    ),
    EditSpec("gradients", "gradients:bf16|offload", numbers=Numbers("gradients are rounded to bf16", _HALF)),
    EditSpec("parameters", "parameters:bf16", numbers=Numbers("all is computed in bf16", _HALF)),
    EditSpec(
        "checkpoint",
        "checkpoint:GLOB[:every=K|:group=K][:reentrant]",
        trying_needs="modules whose names match, none of them compiled",
        code="x = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)  # each module that matches {}",
    ),
    EditSpec(
        "batch",
        "batch:×F",
        numbers=Numbers("gradients are means over another batch", None),
        trying_needs="a DataLoader that makes batches of a fixed size",
        code="loader = DataLoader(…, batch_size=…)  # {}",
    ),
    EditSpec("loss", "loss:fused[:chunks=N]", numbers=_ROUNDED),
    EditSpec(
        "zero-grad",
        "zero-grad:none",
        choices=("none",),
        trying_needs="a call of zero_grad that sets gradients to zero",
        code="optimizer.zero_grad(set_to_none=True)",
        keywords="set_to_none=True",
    ),
    EditSpec("no-wait", "no-wait:FILE:LINE", changes_memory=False),
    EditSpec("no-host", "no-host:FILE:LINE", changes_memory=False),
    EditSpec("no-checkpoint", "no-checkpoint:GLOB"),
    EditSpec(
        "tf32",
        changes_memory=False,
        numbers=Numbers("products keep 10 bits of mantissa", 1e-3),
        trying_needs="an NVIDIA GPU of compute capability 8.0 or more",
        code='torch.set_float32_matmul_precision("high")',
    ),
    EditSpec(
        "autocast",
        "autocast:bf16",
        numbers=Numbers("products are computed in bf16", _HALF),
        choices=("bf16",),
        trying_needs="a model that is called in training, and no autocast of the script's own",
        code='with torch.autocast("cuda", dtype=torch.bfloat16):  # around the forward pass and the loss',
    ),
    EditSpec(
        "channels-last",
        changes_memory=False,
        numbers=_ROUNDED,
        trying_needs="convolutions, and inputs of four dimensions",
        code="model.to(memory_format=torch.channels_last)  # inputs likewise",
    ),
    EditSpec(
        "cudnn-benchmark",
        changes_memory=False,
        numbers=_ROUNDED,
        trying_needs="convolutions on a GPU",
        code="torch.backends.cudnn.benchmark = True",
    ),
    EditSpec(
        "no-cudnn-attention",
        changes_memory=False,
        numbers=_ROUNDED,
        trying_needs="attention that cuDNN computes, on a GPU",
        code="torch.backends.cuda.enable_cudnn_sdp(False)",
    ),
    EditSpec(
        "compile",
        "compile[:default|reduce-overhead|max-autotune|max-autotune-no-cudagraphs]",
        numbers=_ROUNDED,
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        trying_needs="a model that is called in training and is not compiled",
        code="model = torch.compile(model{})",
    ),
    EditSpec("graphs"),
    EditSpec(
        "workers",
        "workers:N",
        changes_memory=False,
        numbers=Numbers("random numbers of the data are drawn in other processes", None),
        trying_needs="a DataLoader over a dataset with indices",
        code="loader = DataLoader(…, num_workers={}, persistent_workers=True)",
        keywords="num_workers={}, persistent_workers=True",
    ),
    EditSpec(
        "pin-memory",
        changes_memory=False,
        trying_needs="a DataLoader, and a GPU",
        code="loader = DataLoader(…, pin_memory=True)",
        keywords="pin_memory=True",
    ),
    EditSpec(
        "no-anomaly",
        changes_memory=False,
        trying_needs="a script that turns anomaly detection on",
        code="torch.autograd.set_detect_anomaly(False)",
    ),
    EditSpec(
        "threads",
        "threads:N",
        changes_memory=False,
        numbers=_ROUNDED,
        trying_needs="",
        code="torch.set_num_threads({})",
    ),
    EditSpec(
        "allocator",
        "allocator:SETTINGS",
        trying_needs="a GPU",
        code="PYTORCH_CUDA_ALLOC_CONF={}  # in the program's environment",
    ),
    EditSpec("on-time", "on-time:RANK", changes_memory=False),
    EditSpec("gpu", "gpu:×F", changes_memory=False),
    EditSpec("kernels", "kernels:GLOB:×F", changes_memory=False),
    EditSpec("links", "links:×F", changes_memory=False),
    EditSpec("cpu", "cpu:×F", changes_memory=False),
)
"""In the order in which they are applied."""

FORMS = tuple(spec.form or spec.name for spec in EDITS)


@dataclass(frozen=True)
class Edit:
    """An edit as it was written, and what kind it is."""

    text: str
    argument: str
    spec: EditSpec


def parse_edits(texts: Iterable[str]) -> tuple[Edit, ...]:
    """Return edits in the order in which they are applied; UsageError for one that is unknown, or two optimizers."""
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
        is_complete = spec.form.startswith(f"{name}[:") or bool(spec.form) == bool(argument)
        is_known = not argument or not spec.choices or argument in spec.choices
        if spec.name == name and is_complete and is_known:
            if spec.form.endswith(":N") and not argument.isdecimal():
                raise UsageError(f"{text}: write a whole number, such as {name}:4")
            return Edit(text, argument, spec)
    choices = [choice for spec in EDITS if spec.name == name for choice in spec.choices]
    if argument and choices:
        raise UsageError(f"{text}: no {name} {argument!r}; it is one of {', '.join(choices)}")
    raise UsageError(f"no edit {text!r}; edits are {', '.join(FORMS)}")


def read_factor(text: str) -> Fraction:
    """Return the factor that ``×2``, ``x0.5`` or ``1/2`` stands for; UsageError for none, or one too large."""
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


def write_trials(path: Path, calls: Iterable[Trials]) -> None:
    lines = [line for call in calls for line in _lines(call)]
    with whole_file(path) as partial:
        partial.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def _lines(call: Trials) -> Iterable[dict[str, Any]]:
    yield {"plan": asdict(call.plan)}
    yield from ({"prediction": asdict(prediction)} for prediction in call.predictions)
    yield from ({"process": asdict(process)} for process in call.processes)


def read_trials(path: Path) -> tuple[Trials, ...]:
    """Return the calls of `profkit try`, the oldest first.

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
    return tuple(Trials(plan, tuple(predictions), tuple(processes)) for plan, predictions, processes in calls)
