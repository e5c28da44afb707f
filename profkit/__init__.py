"""profkit: where the time of a training step went and who held its memory, in numbers that add up.

The public face. Importing it loads nothing heavy: each name below is fetched from its module on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from profkit.version import __version__

if TYPE_CHECKING:
    from profkit.analysis.efficiency import find_datasheet as find_datasheet
    from profkit.analysis.time_account.step_times import read_step_times as read_step_times
    from profkit.annotation import annotate as annotate
    from profkit.asking import Capture as Capture
    from profkit.asking import open_any as open
    from profkit.reading import compare as compare
    from profkit.reading import open_snapshot as read_snapshot
    from profkit.reading import open_trace as read_trace
    from profkit.recording import record as record
    from profkit.report import simplify_name as simplify_name

_HOMES = {
    "Capture": ("profkit.asking", "Capture"),
    "annotate": ("profkit.annotation", "annotate"),
    "compare": ("profkit.reading", "compare"),
    "find_datasheet": ("profkit.analysis.efficiency", "find_datasheet"),
    "open": ("profkit.asking", "open_any"),
    "read_snapshot": ("profkit.reading", "open_snapshot"),
    "read_step_times": ("profkit.analysis.time_account.step_times", "read_step_times"),
    "read_trace": ("profkit.reading", "open_trace"),
    "record": ("profkit.recording", "record"),
    "simplify_name": ("profkit.report", "simplify_name"),
}

__all__ = [
    "Capture",
    "__version__",
    "annotate",
    "compare",
    "find_datasheet",
    "open",
    "read_snapshot",
    "read_step_times",
    "read_trace",
    "record",
    "simplify_name",
]


def __getattr__(name: str) -> Any:
    try:
        module, there = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module 'profkit' has no attribute {name!r}") from None
    return getattr(import_module(module), there)


def __dir__() -> list[str]:
    return sorted(__all__)
