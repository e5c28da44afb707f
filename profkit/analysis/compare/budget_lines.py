"""One budget's verdict, the same for every kind of budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["ns", "bytes", "share"]


@dataclass(frozen=True)
class BudgetLine:
    """What a budget allows and what was measured, each None where there is none; ``detail`` says how, or why not.

    ``budget`` is the option's name, ``subject`` what of several things it is about: a range, a phase, a context.
    """

    budget: str
    subject: str | None
    measured: float | None
    limit: float | None
    unit: Unit
    held: bool
    detail: str


def broken(budget: str, unit: Unit, limit: float | None, reason: str, subject: str | None = None) -> BudgetLine:
    """Return the line of a budget that cannot be judged."""
    return BudgetLine(budget, subject, None, limit, unit, False, f"cannot be judged: {reason}")
