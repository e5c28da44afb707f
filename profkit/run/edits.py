"""Edits of a program, written as on the command line: what there is, and what each changes.

`whatif` predicts an edit. Edits combine, and their order does not matter: they are applied in that of `EDITS`.
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

    ``numbers`` says what it may do to the numbers that the program computes, empty if nothing. ``choices`` are the
    arguments that it has, if it takes no others.
    """

    name: str
    forms: tuple[str, ...]
    changes_memory: bool = True
    numbers: str = ""
    choices: tuple[str, ...] = ()


EDITS = (
    EditSpec(
        "optimizer",
        ("optimizer:none|sgd|sgd-momentum|adamw-8bit|adamw-fused|offload",),
        numbers="another optimizer learns otherwise",
    ),
    EditSpec(
        "optimizer",
        ("optimizer:fused|foreach",),
        numbers="rounding differs",
        choices=("fused", "foreach"),
    ),
    EditSpec("gradients", ("gradients:bf16|offload",), numbers="gradients are rounded to bf16"),
    EditSpec("parameters", ("parameters:bf16",), numbers="all is computed in bf16"),
    EditSpec("checkpoint", ("checkpoint:GLOB[:every=K|:group=K][:reentrant]",)),
    EditSpec("batch", ("batch:×F",), numbers="gradients are means over another batch"),
    EditSpec("sequence", ("sequence:×F",), numbers="sequences are cut elsewhere"),
    EditSpec("loss", ("loss:fused[:chunks=N]",), numbers="rounding differs"),
    EditSpec("zero-grad", ("zero-grad:none",)),
    EditSpec("drop", ("drop:GLOB",), numbers="something is left out"),
    EditSpec("no-wait", ("no-wait:FILE:LINE",), changes_memory=False),
    EditSpec("no-host", ("no-host:FILE:LINE",), changes_memory=False),
    EditSpec("tf32", ("tf32",), changes_memory=False, numbers="products keep 10 bits of mantissa"),
    EditSpec("autocast", ("autocast:bf16",), numbers="products are computed in bf16", choices=("bf16",)),
    EditSpec("compile", ("compile",), numbers="rounding differs"),
    EditSpec("graphs", ("graphs",)),
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


def _parse(text: str) -> Edit:
    name, _, argument = text.partition(":")
    for spec in sorted(EDITS, key=lambda spec: not spec.choices):
        takes_none = spec.forms == (spec.name,)
        if spec.name == name and takes_none == (not argument) and (not spec.choices or argument in spec.choices):
            return Edit(text, argument, spec)
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
