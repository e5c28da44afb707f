"""Budgets of a run of several ranks: how long they wait for each other, and what the latest of them costs."""

from __future__ import annotations

from collections.abc import Iterator

from profkit.analysis.collectives.comparison import RanksResult
from profkit.analysis.compare.budgets import BudgetLine, Budgets, not_judged

MAX_WAIT, MAX_SKEW = "max-wait", "max-skew"


def judge_ranks(budgets: Budgets, ranks: RanksResult | str) -> Iterator[BudgetLine]:
    """Yield the budgets of ranks that are given; ``ranks`` is the reason if they cannot be compared."""
    asked = [(MAX_WAIT, budgets.max_wait), (MAX_SKEW, budgets.max_skew)]
    for budget, limit in asked:
        if limit is None:
            continue
        if isinstance(ranks, str):
            yield not_judged(budget, "share", limit, ranks)
        elif not ranks.step_ns or ranks.verdict.most_rank is None:
            yield not_judged(budget, "share", limit, "no two ranks recorded the same collectives in a step")
        elif budget == MAX_WAIT:
            share = ranks.waiting_ns / ranks.step_ns
            detail = f"the mean of {len(ranks.ranks)} ranks in collectives, from their arrival to that of the last"
            yield BudgetLine(budget, None, share, limit, "share", share <= limit, detail)
        else:
            share = ranks.verdict.most_ns / max(ranks.verdict.step_ns, 1)
            detail = f"what rank {ranks.verdict.most_rank}, the latest, costs the median rank in a step"
            yield BudgetLine(budget, None, share, limit, "share", share <= limit, detail)
