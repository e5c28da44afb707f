"""What the stages of a pipeline spend in send and recv: waiting for a stage that works longer, or in the bubble.

A stage that receives waits for the stage before it, and in backward for the stage after it: sends and receives pair
ranks off, so nobody arrives last as in a collective. But the stage that works longest never waits for a slower one.
What it spends in send and recv all the same is the filling and draining of the pipeline, and the transfers: the bubble.
The other stages also wait for it, by as much as they work less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from profkit.analysis.collectives.accounts import Account
from profkit.run.light_record import P2P, Group, LightRecord


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


def find_pipelines(records: Sequence[LightRecord], accounts: Sequence[Account]) -> list[Pipeline]:
    """Return the groups whose ranks send to each other, where each of them left a full trace; the first one first."""
    found: dict[tuple[str, tuple[int, ...]], tuple[Group, dict[int, tuple[int, int]]]] = {}
    for record, account in zip(records, accounts, strict=True):
        if not account.is_exact or not account.steps:
            continue
        own = round(sum(account.own_ns(step) for step in range(len(account.steps))) / len(account.steps))
        for group, between_ns in _between(record, len(account.steps)):
            _, of_ranks = found.setdefault((group.name, group.ranks), (group, {}))
            of_ranks[record.rank] = between_ns, own
    step_of = {record.rank: _step_ns(account) for record, account in zip(records, accounts, strict=True)}
    return [
        Pipeline(
            group,
            group.ranks,
            tuple(of_ranks[rank][0] for rank in group.ranks),
            tuple(of_ranks[rank][1] for rank in group.ranks),
            round(float(np.median([step_of[rank] for rank in group.ranks]))),
        )
        for group, of_ranks in (found[key] for key in sorted(found, key=lambda key: key[1]))
        if len(group.ranks) > 1 and set(group.ranks) <= of_ranks.keys()
    ]


def _step_ns(account: Account) -> float:
    steps = range(len(account.steps))
    return sum(account.own_ns(step) + account.exposed_ns[step] for step in steps) / max(len(steps), 1)


def _between(record: LightRecord, steps: int) -> list[tuple[Group, int]]:
    """Return for each group what its sends and receives took per step that nothing hid, over the last ``steps``."""
    sums: dict[int, int] = {}
    for step in [step for step in record.steps if step.name is not None][-steps:]:
        calls = step.collectives
        for row, cause, *_, time in step.since:
            if cause == "communication" and calls.kind[row] in P2P:
                sums[calls.group[row]] = sums.get(calls.group[row], 0) + time
    return [(group, round(sums[group.number] / steps)) for group in record.groups if group.number in sums]
