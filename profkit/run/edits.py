"""Edits of a program, written as on the command line: what there is, and what each changes.

`whatif` predicts an edit; `try` makes one in a run of the program, where it can, and measures. Edits combine, and
their order does not matter: they are applied in that of `EDITS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from profkit.errors import UsageError

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
        """Whether `profkit try` makes the edit in a run of the program."""
        return self.trying_needs is not None

    @property
    def has_optional_argument(self) -> bool:
        """Whether it is written with an argument or without."""
        return self.forms[0].startswith(f"{self.name}[:")


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
        is_complete = spec.has_optional_argument or takes_none == (not argument)
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
