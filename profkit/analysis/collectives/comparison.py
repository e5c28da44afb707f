"""All ranks of a run side by side: what `profkit ranks` shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from profkit.analysis.collectives.accounts import Account, exact_account, named_steps
from profkit.analysis.collectives.bandwidth import GroupRow, sum_groups
from profkit.analysis.collectives.culprit import Verdict, find_culprit
from profkit.analysis.collectives.light_accounts import account_before_waits
from profkit.analysis.collectives.matching import ClockFit, fit_clocks, match_collectives, sum_waits
from profkit.analysis.collectives.pipeline import Pipeline, find_pipelines
from profkit.errors import TraceError
from profkit.files import collector_off
from profkit.run.light_record import Cause, LightRecord
from profkit.run.links import GpuLink, MeasuredLinks
from profkit.trace.columns import Ints
from profkit.trace.nsys_collectives import COMMUNICATOR

MOST_RANKS = 2**17
"""No job has as many ranks."""


@dataclass(frozen=True)
class RankSummary:
    """What one rank did, per step in nanoseconds; ``step_count`` steps are compared, of a full trace not the first.

    ``parts`` are its own time by cause; with ``exposed_ns``, the communication that nothing hid, they sum up to
    ``step_ns``. ``waiting_ns`` is the time in collectives before the last rank arrived, hidden or not.
    ``sm_mhz`` and ``throttle`` are None and () where nobody recorded them. ``parts`` of a rank that only left a light
    record are what it did before the first long wait of a step, and do not sum up to the step.
    """

    rank: int
    node: int
    device: int | None
    source: str
    step_count: int
    step_ns: int
    parts: Mapping[Cause, int]
    exposed_ns: int | None
    waiting_ns: int
    peak_bytes: int | None
    sm_mhz: int | None
    throttle: tuple[str, ...]


@dataclass(frozen=True)
class PeakDifference:
    """How much more memory the rank with the highest peak allocates than the median rank (of two, the other one).

    ``by_category`` is the difference of what both held at their recorded peaks, so that it sums up to the difference of
    those; empty where a snapshot of one of them is missing.
    """

    rank: int
    peak_bytes: int
    median_rank: int
    median_bytes: int
    by_category: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class RanksResult:
    """What the ranks of a run show together; times of ``ranks`` are per step, those of ``groups`` are sums.

    ``lost`` are the ranks of which nothing can be read, each with the reason.
    """

    world_size: int
    ranks: tuple[RankSummary, ...]
    groups: tuple[GroupRow, ...]
    waits_ns: Ints
    verdict: Verdict
    clocks: ClockFit | None
    lost: Mapping[int, str]
    step_count: int
    measured: MeasuredLinks | None = None
    """What was measured of the links."""
    links: tuple[GpuLink, ...] = ()
    """What the links between the GPUs of the first machine are."""
    pipelines: tuple[Pipeline, ...] = ()
    peaks: PeakDifference | None = None
    """None where all ranks need the same memory, or peaks are unknown."""

    @property
    def step_ns(self) -> int:
        """Return the step time of the median rank."""
        return int(np.median([one.step_ns for one in self.ranks])) if self.ranks else 0

    @property
    def is_exact(self) -> bool:
        """Return whether all ranks left full traces."""
        return all(one.exposed_ns is not None for one in self.ranks)

    @property
    def exposed_ns(self) -> int | None:
        """Return the communication per step that nothing hid, of the mean rank."""
        known = [one.exposed_ns for one in self.ranks if one.exposed_ns is not None]
        return round(sum(known) / len(known)) if known else None

    @property
    def waiting_ns(self) -> int:
        """Return the time per step that the mean rank spent in collectives before the last rank arrived."""
        return round(sum(one.waiting_ns for one in self.ranks) / len(self.ranks)) if self.ranks else 0


@collector_off()
def compare_records(
    records: Iterable[LightRecord],
    lost: Mapping[int, str] | None = None,
    measured: MeasuredLinks | None = None,
    links: tuple[GpuLink, ...] = (),
) -> RanksResult:
    """Return the comparison of ranks; the order of ``records`` does not matter.

    Args:
        records: one for each rank.
        lost: the ranks of which nothing can be read, each with the reason.
        measured: what was measured of the links between GPUs of one machine.
        links: what the links are.

    Raises:
        TraceError: a record names more ranks than any job has, as a damaged file may.
    """
    found = sorted(records, key=lambda record: record.rank)
    world_size = max([len(found), *(max(record.world_size, record.rank + 1) for record in found)], default=0)
    if world_size > MOST_RANKS:
        raise TraceError(f"a rank of {world_size:,} is named; jobs of more than {MOST_RANKS:,} ranks are not compared")
    known = _fill_communicators(found)
    everyone = tuple(range(world_size))
    found = [
        replace(record, groups=tuple(replace(group, ranks=group.ranks or everyone) for group in record.groups))
        for record in known
    ]
    index = {record.rank: at for at, record in enumerate(found)}
    matched = match_collectives(found)
    accounts = [exact_account(record) or account_before_waits(record, matched) for record in found]
    waits = sum_waits(matched, len(found), index)
    missing = dict.fromkeys(sorted(set(range(world_size)) - set(index)), "it left no record")
    ranks = tuple(
        _summarize(record, account, int(waited))
        for record, account, waited in zip(found, accounts, waits.sum(axis=1), strict=True)
    )
    return RanksResult(
        world_size=world_size,
        ranks=ranks,
        groups=tuple(sum_groups(matched, world_size, measured, {record.rank: record.node for record in found})),
        waits_ns=waits,
        verdict=find_culprit(found, accounts, matched),
        clocks=fit_clocks(matched),
        lost=missing | dict(lost or {}),
        step_count=max((len(named_steps(record)) for record in found), default=0),
        peaks=compare_peaks(ranks),
        pipelines=tuple(find_pipelines(known, accounts)),
        measured=measured,
        links=measured.links if measured is not None and measured.links else links,
    )


def _fill_communicators(records: Sequence[LightRecord]) -> list[LightRecord]:
    """Return the records, with those ranks in each group that NCCL's communicator alone identifies that used it."""
    users: dict[str, tuple[int, ...]] = {}
    for record in records:
        for name in {group.name for group in record.groups if group.name.startswith(COMMUNICATOR)}:
            users[name] = (*users.get(name, ()), record.rank)
    return [
        replace(
            record,
            groups=tuple(replace(group, ranks=group.ranks or users.get(group.name, ())) for group in record.groups),
        )
        for record in records
    ]


def compare_peaks(ranks: Sequence[RankSummary]) -> PeakDifference | None:
    """Return by how much the rank with the highest peak exceeds the median rank; None if by nothing."""
    known = sorted((one.peak_bytes, -one.rank) for one in ranks if one.peak_bytes is not None)
    if not known or known[0][0] == known[-1][0]:
        return None
    (median_bytes, median_rank), (peak_bytes, rank) = known[(len(known) - 1) // 2], known[-1]
    return PeakDifference(-rank, peak_bytes, -median_rank, median_bytes)


def outliers_first(result: RanksResult) -> Sequence[RankSummary]:
    """Return the ranks, those first whose own time is farthest from the median rank's."""
    own = [sum(one.parts.values()) for one in result.ranks]
    middle = float(np.median(own)) if own else 0.0
    return [
        one for _, one in sorted(zip(own, result.ranks, strict=True), key=lambda it: (-abs(it[0] - middle), it[1].rank))
    ]


def _summarize(record: LightRecord, account: Account, waiting_ns: int) -> RankSummary:
    parts: dict[Cause, int] = {}
    count = len(account.steps)
    for (cause, *_), time in account.mean_parts().items() if count else ():
        parts[cause] = parts.get(cause, 0) + round(time)
    exposed = round(sum(account.exposed_ns) / count) if count and account.is_exact else None
    whole = sum(parts.values()) + exposed if exposed is not None else _median_step(record)
    throttle = dict.fromkeys(reason for step in named_steps(record) for reason in step.throttle)
    return RankSummary(
        rank=record.rank,
        node=record.node,
        device=record.device,
        source=record.source,
        step_count=count,
        step_ns=whole,
        parts=dict(sorted(parts.items())),
        exposed_ns=exposed,
        waiting_ns=round(waiting_ns / max(len(named_steps(record)), 1)),
        peak_bytes=max((step.peak_bytes for step in record.steps if step.peak_bytes is not None), default=None),
        sm_mhz=None if account.sm_mhz is None else round(account.sm_mhz),
        throttle=tuple(throttle),
    )


def _median_step(record: LightRecord) -> int:
    times = [step.end_ns - step.start_ns for step in named_steps(record)]
    return int(np.median(times)) if times else 0
