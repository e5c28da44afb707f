"""Budgets of a run of several ranks: how long they wait for each other, and what the latest of them costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from profkit.analysis.compare.budget_lines import BudgetLine, Budgets, not_judged

if TYPE_CHECKING:
    from profkit.analysis.ranks.comparison import RanksResult

MAX_WAIT, MAX_SKEW = "max-wait", "max-skew"


def judge_ranks(budgets: Budgets, ranks: RanksResult | str) -> Iterator[BudgetLine]:
    """Yield the budgets of ranks that are given; ``ranks`` is the reason if they cannot be compared."""
    asked = [(MAX_WAIT, budgets.max_wait), (MAX_SKEW, budgets.max_skew)]
    for budget, limit in asked:
        if limit is None:
            continue
        if isinstance(ranks, str):
            yield not_judged(budget, "share", limit, ranks)
        elif ranks.why_unknown is not None:
            yield not_judged(budget, "share", limit, ranks.why_unknown)
        elif ranks.verdict.doubt == "untimed":
            yield not_judged(budget, "share", limit, "nobody timed all collectives (TORCH_NCCL_ENABLE_TIMING=1 does)")
        elif budget == MAX_WAIT:
            share = ranks.waiting_ns / max(ranks.step_ns, 1)
            compared = sum(one.waiting_ns is not None for one in ranks.ranks)
            detail = f"the mean of {compared} ranks in collectives, from their arrival to that of the last"
            yield BudgetLine(budget, None, share, limit, "share", share <= limit, detail)
        else:
            share = ranks.verdict.most_ns / max(ranks.verdict.step_ns, 1)
            detail = f"what rank {ranks.verdict.most_rank}, the latest, costs the median rank in a step"
            yield BudgetLine(budget, None, share, limit, "share", share <= limit, detail)
