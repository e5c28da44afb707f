"""Say in one line which ranges wait much for the host though that is not what bounds them."""

from __future__ import annotations

from collections.abc import Sequence

from profkit.analysis.efficiency.host_waits import find_host_waits
from profkit.analysis.efficiency.summary import EfficiencyResult
from profkit.analysis.range_paths import join_path, split_path
from profkit.report.units import format_share

_NAMED = 3


def host_wait_lines(result: EfficiencyResult) -> list[str]:
    """Return the line, or none: faster kernels alone gain less in these ranges than their verdict promises."""
    waits = find_host_waits(result.ranges)
    if not waits:
        return []
    paths = [split_path(row.path) for row in result.ranges]
    words = {"launch-bound": "launch", "host-bound": "host"}
    told = [f"{_name_among(paths, one.path)} {format_share(one.share)} ({words[one.cause]})" for one in waits[:_NAMED]]
    more = f", {len(waits) - _NAMED} more" if len(waits) > _NAMED else ""
    return [f"bound by the largest part of its time; waiting for the host too: {', '.join(told)}{more}"]


def _name_among(paths: Sequence[Sequence[str]], path: str) -> str:
    """Return the shortest end of a path, in whole names, that no other path has."""
    names = split_path(path)
    for count in range(1, len(names)):
        end = names[-count:]
        if sum(other[-count:] == end for other in paths) == 1:
            return join_path(end)
    return path
