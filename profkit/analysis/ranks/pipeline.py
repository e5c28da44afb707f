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

from profkit.analysis.ranks.accounts import Account
from profkit.analysis.ranks.reduced import ReducedRank
from profkit.run.light_record import Group


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
    found: dict[tuple[str, tuple[int, ...]], tuple[Group, dict[int, tuple[int, int]]]] = {}
    for one in ranks:
        account, record = one.exact, one.record
        if account is None or not len(account.own):
            continue
        count = len(account.own)
        own = round(float(account.own.sums().sum()) / count)
        for group in record.groups:
            if group.number in one.between_ns:
                _, of_ranks = found.setdefault((group.name, group.ranks), (group, {}))
                of_ranks[record.rank] = round(one.between_ns[group.number] / count), own
    step_of = {one.record.rank: _step_ns(one.exact) for one in ranks if one.exact is not None}
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
    return float((account.own.sums() + account.exposed_ns).sum()) / max(len(account.own), 1)
