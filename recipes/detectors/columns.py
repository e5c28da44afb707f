"""What a column holds, told from its heading: a time, memory, the sequence length, the width, a share, or a label."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Quantity = Literal[
    "time", "memory", "memory per square", "length", "width", "parameters", "share", "number", "outcome", "label"
]
Phase = Literal["forward", "backward", "forward+backward", "optimizer", "step"]
Statistic = Literal["location", "deviation"]

SECONDS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
BINARY_BYTES = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
DECIMAL_BYTES = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
BYTES = {"b": 1, "bytes": 1, **BINARY_BYTES, **DECIMAL_BYTES}

_LENGTHS = {
    "seq",
    "seq len",
    "seq length",
    "sequence",
    "sequence length",
    "context",
    "context length",
    "length",
    "s",
    "n",
    "t",
}
_WIDTHS = {"d model", "dmodel", "width", "d", "head dim", "d head"}
_FORWARD = {"fwd", "fws", "forward"}
_BACKWARD = {"bwd", "back", "backward"}
_MEANS = {"avg", "mean", "average"}
_LOCATIONS = {*_MEANS, "median", "min", "max", "p10", "p90"}
_DEVIATIONS = {"std", "stdev", "sd", "deviation", "mad"}
_MEMORY = {"mem", "memory", "peak", "saved", "allocated", "reserved", "activations"}
_PARAMETERS = {"parameters", "params"}
_OUTCOMES = {"status", "reason"}
_COUNTED = {"kernels", "graphs", "retries", "launches", "calls", "count", "counts"}
_PER_SQUARE = re.compile(
    r"(/|(?:\b|_)per[ _])\s*(seq(?:uence|[ _]len(?:gth)?)?|s|n|l|t|context)\s*(\^\s*2|\*\*\s*2|²|2\b|[ _]squared?)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Role:
    """What a column holds. ``base`` is its heading without unit and statistic: what belongs together has the same."""

    quantity: Quantity
    unit: str | None = None
    phase: Phase | None = None
    statistic: Statistic = "location"
    base: tuple[str, ...] = ()
    is_mean: bool = False

    @property
    def is_label(self) -> bool:
        """Whether the column says which row it is; what is measured does not, nor what was worked out from that."""
        return self.quantity in ("length", "width", "label")

    @property
    def seconds(self) -> float:
        """How many seconds the unit is; 1 where none is given: proportions hold in any."""
        return SECONDS.get(self.unit or "", 1.0)


def recognize(heading: str) -> Role:
    """Return what the column under ``heading`` holds: ``fwd std (sec)``, ``mem_after_inputs_MiB``, ``d_model``."""
    words = re.findall(r"[a-zµ]+\d*|\d+|%", heading.lower())
    plain = " ".join(words)
    if plain in _LENGTHS or plain in _WIDTHS:
        return Role("length" if plain in _LENGTHS else "width", base=tuple(words))
    # A pivot's column is called by a value, such as a model's size: in 2.7B no bytes are meant.
    is_value = re.fullmatch(r"[\d.]+[a-z]?", heading.strip(), re.IGNORECASE) is not None
    unit = words[-1] if len(words) > 1 and words[-1] in {*SECONDS, *BYTES} and not is_value else None
    rest = [word for word in words if word != unit]
    base = tuple(word for word in rest if word not in _LOCATIONS | _DEVIATIONS)
    statistic: Statistic = "deviation" if _DEVIATIONS & set(rest) else "location"
    if _PER_SQUARE.search(heading) or {"share", "%", "percent"} & set(words):
        return Role("memory per square" if _PER_SQUARE.search(heading) else "share", unit, base=base)
    if unit in BYTES or (unit is None and _MEMORY & set(words)):
        return Role("memory", unit, statistic=statistic, base=base)
    if unit in SECONDS or _LOCATIONS & set(words) or _DEVIATIONS & set(words):
        return Role("time", unit, phase_of(set(rest)), statistic, base, bool(_MEANS & set(rest)))
    return Role(_kind_of(set(words)), base=tuple(words))


def _kind_of(words: set[str]) -> Quantity:
    """Return what a column holds that is neither a size of its own, a time, nor memory."""
    if _OUTCOMES & words:
        return "outcome"
    if _PARAMETERS & words:
        return "parameters"
    return "number" if _COUNTED & words else "label"


def phase_of(words: set[str]) -> Phase | None:
    """Return the phase that some words name, in lower case: ``fwd``, ``step``."""
    forward, backward = bool(words & _FORWARD), bool(words & _BACKWARD)
    if forward or backward:
        return "forward+backward" if forward and backward else "forward" if forward else "backward"
    return "optimizer" if "optimizer" in words else "step" if words & {"step", "steps", "iteration"} else None
