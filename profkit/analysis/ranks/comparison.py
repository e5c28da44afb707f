"""All ranks of a run side by side, and what groups of them exchange: what `profkit ranks` shows.

In a pipeline a stage that receives waits for the stage before it, and in backward for the stage after it: sends and
receives pair ranks off, so nobody arrives last as in a collective. But the stage that works longest never waits for a
slower one. What it spends in send and recv all the same is the filling and draining of the pipeline, and the transfers:
the bubble. The other stages also wait for it, by as much as they work less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from profkit.analysis import NotebookResult
from profkit.analysis.opened import OpenedTrace
from profkit.analysis.ranks.culprit import NOT_COMPARED, Verdict, find_culprit
from profkit.analysis.ranks.light_costs import account_before_waits, has_untimed_waits, keep_steps
from profkit.analysis.ranks.matching import Matched, match_collectives, steps_between_matches, sum_waits
from profkit.analysis.ranks.own_time import Account, Cause, ReducedRank
from profkit.analysis.ranks.reduce import ReadRanks, read_and_reduce
from profkit.errors import CaptureError, TraceError
from profkit.files import collector_off
from profkit.run.directory import Run
from profkit.run.light_columns import UNKNOWN
from profkit.run.light_record import Group
from profkit.trace.columns import Ints

MOST_RANKS = 2**17
"""No job has as many ranks."""


@dataclass(frozen=True)
class RankSummary:
    """What one rank did, per step in nanoseconds; ``step_count`` steps are compared, of a full trace not the first.

    ``parts`` are its own time by cause; with ``exposed_ns``, the communication that nothing hid, they sum up to
    ``step_ns``. ``waiting_ns`` is the time in collectives before the last rank arrived, hidden or not; None of a rank
    whose record ends too early to be compared. ``sm_mhz`` and ``throttle`` are None and () where nobody recorded them.
    ``parts`` of a rank that only left a light record are the medians of its phases, added up, in what it did from the
    collective before the first long wait of a step, often one of the step before, to that wait: they do not sum up to
    the step, and may be longer.
    """

    rank: int
    node: int
    device: int | None
    source: str
    step_count: int
    step_ns: int
    parts: Mapping[Cause, int]
    exposed_ns: int | None
    waiting_ns: int | None
    peak_bytes: int | None
    sm_mhz: int | None
    throttle: tuple[str, ...]


@dataclass(frozen=True, eq=False, repr=False)
class RanksResult(NotebookResult, rows="ranks", row_type=RankSummary):
    """What the ranks of a run show together; times of ``ranks`` are per step, those of ``groups`` are sums.

    ``lost`` are the ranks of which nothing can be read, each with the reason.
    """

    world_size: int
    ranks: tuple[RankSummary, ...]
    groups: tuple[GroupRow, ...]
    waits_ns: Ints
    verdict: Verdict
    lost: Mapping[int, str]
    step_count: int
    """Over how many steps the sums of collectives are: those whose collectives all ranks recorded."""
    recorded_step_count: int = 0
    pipelines: tuple[Pipeline, ...] = ()
    is_untimed: bool = False
    """Whether ranks may have waited where nobody timed it, so that waits are the least that they may be."""
    by_clocks: bool = False
    """Whether waits rest on the clocks of several machines, as gloo's do without a profiler."""
    assumed_groups: tuple[str, ...] = ()
    """The groups of which nobody says which ranks belong to them: all do, it is assumed."""
    short: Mapping[int, int] = field(default_factory=dict)
    """The ranks whose record holds fewer steps than the median rank's, and how many."""
    recorded_step_ns: int | None = None
    """What a recorded step takes by the time account; None where no rank left a trace with steps."""

    @property
    def step_ns(self) -> int:
        """Return the recorded step time; without a trace, that of the median rank."""
        if self.recorded_step_ns is not None:
            return self.recorded_step_ns
        return int(np.median([rank.step_ns for rank in self.ranks])) if self.ranks else 0

    @property
    def is_exact(self) -> bool:
        return all(rank.exposed_ns is not None for rank in self.ranks)

    @property
    def exposed_ns(self) -> int | None:
        """Return the communication per step that nothing hid, of the mean rank."""
        known = [rank.exposed_ns for rank in self.ranks if rank.exposed_ns is not None]
        return round(sum(known) / len(known)) if known else None

    @property
    def waiting_ns(self) -> int:
        """Return the time per step that the mean rank spent in collectives before the last rank arrived."""
        known = [rank.waiting_ns for rank in self.ranks if rank.waiting_ns is not None]
        return round(sum(known) / len(known)) if known else 0

    @property
    def late_rank(self) -> int | None:
        return None if self.verdict.culprit is None else self.verdict.culprit.rank

    @property
    def waited_for(self) -> int | None:
        """The rank that costs the others most, late or not; None if none costs them anything."""
        return self.verdict.most_rank if self.verdict.most_ns else None

    @property
    def why_unknown(self) -> str | None:
        if self.verdict.most_rank is not None:
            return None
        return NOT_COMPARED if self.recorded_step_count else "no step was recorded"


@collector_off()
def compare_ranks(
    ranks: Iterable[ReducedRank], lost: Mapping[int, str] | None = None, recorded_step_ns: int | None = None
) -> RanksResult:
    """Return the comparison of ranks; the order of ``ranks`` does not matter.

    ``lost`` are those of which nothing can be read, with the reason. ``recorded_step_ns`` is what a step takes by the
    time account of their traces; None without traces.

    Raises:
        TraceError: a record names more ranks than any job has, as a damaged file may.
    """
    full = sorted(ranks, key=lambda rank: rank.record.rank)
    known = _make_comparable(full)
    records = {rank.record.rank: rank.record for rank in known}
    world_size = max([len(known), *(max(one.world_size, one.rank + 1) for one in records.values())], default=0)
    if world_size > MOST_RANKS:
        raise TraceError(f"a rank of {world_size:,} is named; jobs of more than {MOST_RANKS:,} ranks are not compared")
    assumed = {group.name for record in records.values() for group in record.groups if not group.ranks}
    reduced = [_name_ranks_of_groups(rank, tuple(range(world_size))) for rank in known]
    matched = match_collectives(reduced)
    accounts = [rank.exact or account_before_waits(rank, matched) for rank in reduced]
    is_untimed = has_untimed_waits(reduced, matched)
    counts = [int(steps_between_matches(rank.record.rank, rank.steps.named, matched).sum()) for rank in reduced]
    waits = sum_waits(matched, {number: at for at, number in enumerate(records)})
    missing = dict.fromkeys(sorted(set(range(world_size)) - set(records)), "it left no record")
    recorded = {rank.record.rank: len(rank.steps.named) for rank in reduced}
    usual_count = float(np.median(list(recorded.values()))) if recorded else 0.0
    short = {rank: count for rank, count in recorded.items() if count < usual_count}
    members = {rank for match in matched if len(match) for rank in match.ranks}
    left_out = set(short) - members if members else set()
    rows = tuple(
        _summarize(rank, before.exact or account, None if rank.record.rank in left_out else int(waited), count)
        for rank, before, account, waited, count in zip(reduced, full, accounts, waits.sum(axis=1), counts, strict=True)
    )
    return RanksResult(
        world_size=world_size,
        ranks=rows,
        groups=tuple(sum_groups(matched, reduced, world_size)),
        waits_ns=waits,
        verdict=find_culprit(reduced, accounts, matched, is_untimed=is_untimed),
        lost=missing | dict(lost or {}),
        step_count=max(counts, default=0),
        recorded_step_count=max(recorded.values(), default=0),
        is_untimed=is_untimed and not all(account.is_exact for account in accounts),
        by_clocks=any(
            match.only_called.any() and len({records[rank].node for rank in match.ranks}) > 1 for match in matched
        ),
        assumed_groups=tuple(sorted(assumed)) if world_size > 2 else (),
        short=short,
        pipelines=tuple(find_pipelines(known)),
        recorded_step_ns=recorded_step_ns,
    )


def _name_ranks_of_groups(rank: ReducedRank, everyone: tuple[int, ...]) -> ReducedRank:
    groups = tuple(replace(group, ranks=group.ranks or everyone) for group in rank.record.groups)
    light = None if rank.light is None else _name_ranks_of_groups(rank.light, everyone)
    return replace(rank, record=replace(rank.record, groups=groups), light=light)


def _make_comparable(ranks: Sequence[ReducedRank]) -> list[ReducedRank]:
    """Return the ranks so that their steps can be compared: where only some left full traces, all by light records.

    What a trace knows of a step and what a light record knows are not the same. Light records have those steps alone
    that are in a trace: the third step of a trace is another than the third of theirs. They keep the trace's source,
    for a profiler slowed these ranks. So too with traces without collectives that light records know, and with traces
    of ranges alone, as nsys leaves them without a GPU.
    """
    traced = [rank for rank in ranks if rank.record.source != "light"]
    is_known = any(rank.exact is not None and len(rank.calls) for rank in traced)
    light = [rank.light for rank in ranks if rank.light is not None]
    knows_more = any((~rank.calls.is_pairwise).any() for rank in light)
    is_alike = len(traced) == len(ranks) and (is_known or not knows_more)
    if is_alike or not traced:
        return list(ranks)
    named = {name for rank in traced for name in rank.steps.names if name is not None}
    limited = [keep_steps(rank.light or replace(rank, exact=None), named) for rank in ranks]
    return [
        replace(rank, record=replace(rank.record, source=before.record.source))
        for rank, before in zip(limited, ranks, strict=True)
    ]


def join_ranks(reads: Sequence[ReadRanks]) -> RanksResult:
    lost = [entry for read in reads for entry in read.lost]
    unknown = [reason for rank, reason in lost if rank is None]
    if unknown:
        raise CaptureError(unknown[0])
    reasons = {rank: reason for rank, reason in lost if rank is not None}
    ranks = [rank for read in reads for rank in read.ranks]
    # The n-th steps of all traces are one, which takes as long as the longest.
    recorded_ns = [read.recorded_ns for read in reads if read.recorded_ns]
    longest = [max(together) for together in zip(*recorded_ns, strict=False)]
    return compare_ranks(ranks, reasons, round(sum(longest) / len(longest)) if longest else None)


@collector_off()
def compare_opened(opened: OpenedTrace | None, run: Run | None) -> RanksResult | None:
    """Return the comparison of the ranks of a trace, and of the light records of its run; None of one rank."""
    light = {} if run is None else run.light_records
    if len(light) < 2 and (opened is None or len(opened.ranks.members) < 2):
        return None
    read = read_and_reduce(light, None if opened is None else lambda: opened)
    return join_ranks([read]) if len(read.ranks) > 1 else None


def outliers_first(result: RanksResult) -> Sequence[RankSummary]:
    """Return the rank that is late, then the others, those first whose own time is farthest from the median rank's."""
    own = {rank.rank: sum(rank.parts.values()) for rank in result.ranks}
    middle = float(np.median(list(own.values()))) if own else 0.0
    return sorted(
        result.ranks, key=lambda rank: (rank.rank != result.late_rank, -abs(own[rank.rank] - middle), rank.rank)
    )


def _summarize(rank: ReducedRank, account: Account, waiting_ns: int | None, step_count: int) -> RankSummary:
    by_cause: dict[Cause, float] = {}
    record, steps, count = rank.record, rank.steps, len(account)
    for (cause, *_), time in account.usual().items():
        by_cause[cause] = by_cause.get(cause, 0.0) + time
    parts = {cause: round(time) for cause, time in sorted(by_cause.items())}
    exposed = round(float(account.exposed_ns.sum()) / count) if count and account.is_exact else None
    times = (steps.end_ns - steps.start_ns)[steps.named]
    median_step = int(np.median(times)) if len(times) else 0
    throttle = dict.fromkeys(reason for at in steps.named.tolist() for reason in steps.throttle[at])
    peak = int(steps.peak_bytes.max(initial=UNKNOWN))
    return RankSummary(
        rank=record.rank,
        node=record.node,
        device=record.device,
        source=record.source,
        step_count=count,
        step_ns=median_step if exposed is None else sum(parts.values()) + exposed,
        parts=parts,
        exposed_ns=exposed,
        waiting_ns=None if waiting_ns is None else round(waiting_ns / max(step_count, 1)),
        peak_bytes=None if peak == UNKNOWN else peak,
        sm_mhz=None if account.sm_mhz is None else round(account.sm_mhz),
        throttle=tuple(throttle),
    )


_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "gather": 1, "scatter": 1}
"""How often each rank's part passes every other rank."""


def bus_factor(kind: str, ranks: int) -> float:
    """Return what nccl-tests multiplies the algorithm bandwidth by to get the bus bandwidth."""
    return _ROUNDS[kind] * (ranks - 1) / ranks if kind in _ROUNDS else 1.0


@dataclass(frozen=True)
class GroupRow:
    """One kind of collective in the groups of one name; times are sums over all of them.

    ``count`` counts each collective once, not once a rank. ``byte_count`` and the bandwidths (bytes per second) are
    None where sizes are unknown, ``wire_ns`` where nobody need wait, so that the last arrival is unknown. Hidden,
    exposed and waiting time are those of the mean rank of all ranks in these groups; ``hidden_ns`` and ``exposed_ns``
    are None where a rank does not say.

    A send is counted at its sender, a receive at its receiver. ``wire_ns`` of sends is how long they took there: NCCL
    takes a message into its own buffer, so that a sender need not wait for a receiver that comes late, unless that
    buffer is full. A receive also waits for its sender: it has no ``wire_ns``, nor has a send in one kernel with a
    receive.
    """

    group: str
    rank_count: int
    kind: str
    dtype: str | None
    count: int
    byte_count: int | None
    wire_ns: int | None
    algorithm_bandwidth: float | None
    bus_bandwidth: float | None
    hidden_ns: int | None
    exposed_ns: int | None
    waiting_ns: int


def _group_label(group: Group, world_size: int) -> str:
    if group.dimension:
        return group.dimension
    size = len(group.ranks)
    return "all ranks" if size == world_size else f"groups of {size}"


class _Part(NamedTuple):
    """Collectives of one group and kind, one each in ``byte_count`` and ``wire_ns``; the others are of ``ranks``."""

    ranks: tuple[int, ...]
    byte_count: Ints
    wire_ns: Ints
    lengths_ns: Ints
    hidden_ns: Ints
    wait_ns: Ints


_Key = tuple[str, int, str, str | None]
"""A row's group, number of ranks, kind and dtype."""


def sum_groups(matched: Sequence[Matched], ranks: Sequence[ReducedRank], world_size: int) -> list[GroupRow]:
    """Return a row for each name of groups, kind and dtype; the longest first."""
    parts_of_row: dict[_Key, list[_Part]] = {}
    for group, kind, dtype, part in (*_parts_of(matched), *_sent(ranks, matched)):
        key = _group_label(group, world_size), len(group.ranks), kind, dtype
        parts_of_row.setdefault(key, []).append(part)
    rows = [_sum_one(*key, parts) for key, parts in parts_of_row.items()]
    return sorted(rows, key=lambda row: (-(row.wire_ns or 0) - row.waiting_ns, row.group, row.kind, row.dtype or ""))


def _parts_of(matched: Sequence[Matched]) -> Iterator[tuple[Group, str, str | None, _Part]]:
    for match in matched:
        for kind, dtype in dict.fromkeys(zip(match.kind, match.dtype, strict=True)):
            some = match.take((match.kind == kind) & (match.dtype == dtype))
            times = some.duration_ns, some.hidden_ns, some.wait_ns
            yield match.group, kind, dtype, _Part(match.ranks, some.byte_count, some.wire_ns, *times)


def _sent(ranks: Sequence[ReducedRank], matched: Sequence[Matched]) -> Iterator[tuple[Group, str, str | None, _Part]]:
    named = {(group.name, group.ranks): group for rank in ranks for group in rank.record.groups if group.dimension}
    for rank in ranks:
        calls = rank.calls.take(rank.calls.is_pairwise)
        calls = calls.take(steps_between_matches(rank.record.rank, calls.step, matched))
        for group in rank.record.groups if len(calls) else ():
            of_group = calls.take(calls.group == group.number)
            for what in np.unique(of_group.what).tolist() if len(group.ranks) > 1 else ():
                (kind, dtype), some = calls.names[what], of_group.take(of_group.what == what)
                # Of a kernel that receives too, or of which nobody says that it only sends, the size is unknown.
                wire_ns = np.where((kind == "send") & (some.bytes != UNKNOWN), some.duration_ns, UNKNOWN)
                part = _Part(group.ranks, some.bytes, wire_ns, some.duration_ns, some.hidden_ns, np.zeros(0, np.int64))
                yield named.get((group.name, group.ranks), group), kind, dtype, part


def _sum_one(label: str, size: int, kind: str, dtype: str | None, parts: Sequence[_Part]) -> GroupRow:
    # A rank is in one of the groups of a mesh dimension, as a rule: what ranks of different groups did adds up to no
    # rank's time.
    ranks = len({rank for part in parts for rank in part.ranks})
    sizes, wires, lengths, hidden, waits = (
        np.concatenate([column.reshape(-1) for column in columns]) for columns in list(zip(*parts, strict=True))[1:]
    )
    total_bytes, wire_ns = (int(column.sum()) if (column >= 0).all() else None for column in (sizes, wires))
    rate = total_bytes / wire_ns * 1e9 if total_bytes is not None and wire_ns else None
    is_hidden_known = bool((hidden >= 0).all() and (lengths >= 0).all())
    hidden_ns = round(int(hidden.sum()) / ranks) if is_hidden_known else None
    return GroupRow(
        group=label,
        rank_count=size,
        kind=kind,
        dtype=dtype,
        count=len(sizes),
        byte_count=total_bytes,
        wire_ns=wire_ns,
        algorithm_bandwidth=rate,
        bus_bandwidth=None if rate is None else rate * bus_factor(kind, size),
        hidden_ns=hidden_ns,
        exposed_ns=None if hidden_ns is None else round(int(lengths.sum()) / ranks) - hidden_ns,
        waiting_ns=round(int(waits.sum()) / ranks),
    )


@dataclass(frozen=True)
class Pipeline:
    """The ranks of one pipeline, in the order of its group; times are per step.

    ``between_ns`` is what each rank spends in send and recv that nothing hides, ``own_ns`` what it does by itself.
    """

    group: Group
    ranks: tuple[int, ...]
    between_ns: tuple[int, ...]
    own_ns: tuple[int, ...]
    step_ns: int

    @property
    def longest(self) -> int:
        """Return the position of the rank that works longest."""
        return self.own_ns.index(max(self.own_ns))

    @property
    def bubble_ns(self) -> int:
        """Return what even the rank that works longest spends in send and recv."""
        return self.between_ns[self.longest]

    @property
    def uneven_ns(self) -> int:
        """Return how much longer it works than the rank that works least."""
        return max(self.own_ns) - min(self.own_ns)


def find_pipelines(ranks: Sequence[ReducedRank]) -> list[Pipeline]:
    """Return the groups whose ranks send to each other, where each of them left a full trace; the first one first."""
    by_group: dict[tuple[tuple[int, ...], str], dict[int, tuple[Group, int, int, float]]] = {}
    for rank in ranks:
        if rank.exact is None or not len(rank.exact):
            continue
        own_ns, count = rank.exact.sums(), len(rank.exact)
        step_ns = float((own_ns + rank.exact.exposed_ns).sum()) / count
        for group in rank.record.groups:
            if group.number in rank.between_ns:
                times = round(rank.between_ns[group.number] / count), round(float(own_ns.sum()) / count), step_ns
                by_group.setdefault((group.ranks, group.name), {})[rank.record.rank] = group, *times
    pipelines = []
    for (numbers, _), of_ranks in sorted(by_group.items(), key=lambda item: item[0][0]):
        if len(numbers) > 1 and set(numbers) <= of_ranks.keys():
            _, between, own, steps = zip(*(of_ranks[number] for number in numbers), strict=True)
            group = next(iter(of_ranks.values()))[0]
            pipelines.append(Pipeline(group, numbers, between, own, round(float(np.median(steps)))))
    return pipelines
