"""What a run may be held to, and the line that says of each budget whether it held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["ns", "bytes", "share"]


@dataclass(frozen=True)
class Budgets:
    """The limits that a run must keep; None means no limit. ``max_shares`` are (category or range, fraction)."""

    max_step_ns: int | None = None
    max_peak_bytes: int | None = None
    max_idle: float | None = None
    min_mfu: float | None = None
    max_shares: tuple[tuple[str, float], ...] = ()
    max_wait: float | None = None
    max_skew: float | None = None

    @property
    def of_ranks(self) -> bool:
        """Return whether some of them are about several ranks."""
        return self.max_wait is not None or self.max_skew is not None


@dataclass(frozen=True)
class BudgetLine:
    """What a budget allows and what was measured, None if there is none; ``detail`` says how, or why it was not judged.

    ``budget`` is the option's name; ``subject`` is the range, phase or context that the line is about, if any.
    ``judged`` is False if nothing could be measured; then ``held`` is False too.
    """

    budget: str
    subject: str | None
    measured: float | None
    limit: float | None
    unit: Unit
    held: bool
    detail: str
    judged: bool = True


def not_judged(budget: str, unit: Unit, limit: float | None, reason: str, subject: str | None = None) -> BudgetLine:
    """Return the line of a budget that cannot be judged."""
    return BudgetLine(budget, subject, None, limit, unit, False, reason, judged=False)
