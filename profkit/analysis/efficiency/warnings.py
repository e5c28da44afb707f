"""What a reader of the efficiency table must know before trusting it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from profkit.analysis.attribution import Attribution
from profkit.analysis.efficiency.result import EfficiencyRow
from profkit.analysis.efficiency.run_facts import RunFacts
from profkit.analysis.range_paths import select_ranges
from profkit.analysis.selection import count_in_warmup
from profkit.analysis.step_times import PhaseTimes
from profkit.analysis.warnings import warn_of_placement
from profkit.findings import Finding
from profkit.names import PHASES, STEP

_WIDE = 0.3
"""The standard deviation, as a share of the mean, past which `profkit run` calls times wide too."""
_APART, _PART = 1.4, 0.1
"""How many times its 10th percentile a phase's 90th must be to be told, and what share of the step it must have."""
_UUID_HEAD = len("GPU-01234567")
_SLIGHT = 0.02
"""What profiling adds to a step, as a share of it, below which it decides no verdict."""


def warn_of_efficiency(
    attribution: Attribution, request: str | None, rows: Sequence[EfficiencyRow], facts: RunFacts
) -> list[Finding]:
    """Return what is odd about the ranges asked for, what their verdicts rest on, and what could not be counted."""
    return [
        *_warn_of_warmup(attribution, request),
        *_warn_of_launch_bound(rows, facts),
        *_warn_of_spread(facts),
        *_warn_of_uneven_phases(facts),
        *_warn_of_ceilings(facts),
        *_warn_of_missing(facts),
        *warn_of_placement(attribution),
    ]


def _warn_of_warmup(attribution: Attribution, request: str | None) -> list[Finding]:
    if request is None:
        return []
    members = select_ranges(attribution, request)
    warm, name = count_in_warmup(attribution, members)
    if not warm:
        return []
    return [
        Finding(
            "warmup",
            f"{warm} of {len(members)} instances of {request!r} lie inside `{name}`; they have rows of their own, below"
            f" {shlex.quote(name)}",
        )
    ]


def _warn_of_launch_bound(rows: Sequence[EfficiencyRow], facts: RunFacts) -> list[Finding]:
    """Return that a profiler makes launching slower, wherever that decided a verdict."""
    bound = [row for row in rows if row.verdict == "launch-bound"]
    if not bound:
        return []
    if all(row.idle_factor is None for row in bound):
        return [
            Finding(
                "no-clean-twin",
                "a profiler slows each launch, and how long the steps take without one is not known here: ranges said"
                " to be launch-bound are less so, or not at all, unprofiled; `profkit run` times both",
            )
        ]
    phases = facts.step_times.phases if facts.step_times is not None else ()
    costs = [one.cost for one in phases if one.phase == STEP and one.cost is not None]
    cost = max(costs, key=abs, default=None)
    if cost is not None and abs(cost) < _SLIGHT:
        return []
    said = "a profiler slows each launch" if cost is None else f"steps took {cost:+.0%} under the profiler"
    message = f"{said}: verdicts and the ranges' idle shares rest on the unprofiled times"
    return [Finding("inflation", message)]


def _warn_of_spread(facts: RunFacts) -> list[Finding]:
    """Return which unprofiled steps took so unlike times that their median says little: verdicts and MFU rest on it."""
    phases = () if facts.step_times is None else facts.step_times.phases
    wide = [one for one in phases if one.phase == STEP and (one.clean.relative_deviation or 0.0) > _WIDE]
    return [
        Finding(
            "uneven-clean-steps",
            f"{one.clean.count} unprofiled steps{_where(one)} vary widely, by {one.clean.relative_deviation:.0%} of"
            " their mean (standard deviation): verdicts and MFU rest on their median, and are no surer; time more steps"
            " (`profkit run --warmup`)",
        )
        for one in wide
    ]


def _warn_of_uneven_phases(facts: RunFacts) -> list[Finding]:
    """Return which phases took so unlike times without a profiler that their medians may lie between two kinds of them.

    A step can be even where a phase of it is not: two modes of one phase are lost among the others' time.
    """
    uneven = []
    for one in facts.step_times.phases if facts.step_times is not None else ():
        step, clean = facts.clean_times(STEP, one.context), one.clean
        if one.phase not in PHASES or step is None or clean.median < _PART * step.clean.median:
            continue
        if clean.p90 > _APART * clean.p10:
            uneven.append(f"{one.phase}{_where(one)} took {_ms(clean.p10)} to {_ms(clean.p90)} ms")
    if not uneven:
        return []
    whose = "its verdict and idle share" if len(uneven) == 1 else "their verdicts and idle shares"
    message = f"{', '.join(uneven)} unprofiled (10th to 90th percentile): {whose} rest on the median"
    return [Finding("uneven-clean-phases", message)]


def _where(one: PhaseTimes) -> str:
    return "" if one.context is None else f" at context {one.context}"


def _ms(time_ns: float) -> str:
    time_ms = time_ns / 1e6
    return f"{time_ms:#.3g}" if time_ms < 100 else f"{time_ms:,.0f}"


def _warn_of_ceilings(facts: RunFacts) -> list[Finding]:
    """Return that the peaks are those of another GPU than the run's, though of its name."""
    if facts.ceilings_uuid is None or facts.peaks is None:
        return []
    measured = f"{facts.peaks.gpu} ({facts.ceilings_uuid[:_UUID_HEAD]})"
    return [Finding("other-gpu", f"the ceilings were measured on another {measured} than the run's")]


def _warn_of_missing(facts: RunFacts) -> list[Finding]:
    if facts.work is None or not facts.work.missing:
        return []
    return [
        Finding("uncounted", f"operators without a formula, which count as no work: {', '.join(facts.work.missing)}")
    ]
