"""Say in one line which ranges wait much for the host though that is not what bounds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from profkit.analysis.efficiency.result import EfficiencyResult, EfficiencyRow
from profkit.analysis.range_paths import join_path, split_path
from profkit.report.units import format_share

_SAY_SO = ("launch-bound", "host-bound")
_MUCH = 0.2
"""The share of a range's time that waiting for the host must have to be told where it is not the largest."""
_NAMED = 3


@dataclass(frozen=True)
class _Wait:
    """What a range waits for, in the table's word for it: ``launch`` or ``host`` (anything but launching)."""

    path: str
    word: str
    share: float
    time_ns: float


def host_wait_lines(result: EfficiencyResult) -> list[str]:
    """Return the line, or none: faster kernels alone gain less in these ranges than their verdict promises.

    The longest wait stands first. What lies within a range that is named for the same wait is not named again.
    """
    waits: list[_Wait] = []
    for one in _find_waits(result.ranges):
        if not any(one.word == above.word and one.path.startswith(f"{above.path}/") for above in waits):
            waits.append(one)
    if not waits:
        return []
    waits.sort(key=lambda one: -one.time_ns)
    paths = [split_path(row.path) for row in result.ranges]
    told = [f"{_name_among(paths, one.path)} {format_share(one.share)} ({one.word})" for one in waits[:_NAMED]]
    more = f", {len(waits) - _NAMED} more" if len(waits) > _NAMED else ""
    return [f"bound by the largest part of its time; waiting for the host too: {', '.join(told)}{more}"]


def _find_waits(rows: Sequence[EfficiencyRow]) -> Iterator[_Wait]:
    """Yield the long ones; a range stands behind those around it, as in the table."""
    for row in rows:
        if row.gpu is None or row.verdict in _SAY_SO:
            continue
        span_ns = row.gpu.span_ns_at(row.best_idle_factor)
        for word, share in (("launch", row.launching_share), ("host", row.host_share)):
            if share is not None and share >= _MUCH:
                yield _Wait(row.path, word, share, share * span_ns)


def _name_among(paths: Sequence[Sequence[str]], path: str) -> str:
    """Return the shortest end of a path, in whole names, that no other path has."""
    names = split_path(path)
    for count in range(1, len(names)):
        end = names[-count:]
        if sum(other[-count:] == end for other in paths) == 1:
            return join_path(end)
    return path
