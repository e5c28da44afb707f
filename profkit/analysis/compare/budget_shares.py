"""Judge what share of the measured steps' kernel time a category or a range takes."""

from __future__ import annotations

from typing import Literal

from profkit.analysis.attribution import Attribution
from profkit.analysis.categories import CATEGORIES
from profkit.analysis.compare.budget_lines import BudgetLine, broken
from profkit.analysis.compare.step_samples import StepSamples, has_measured_steps, sample_steps
from profkit.analysis.range_paths import select_ranges
from profkit.errors import TraceError, UsageError
from profkit.trace.columns import distinct_values

MAX_SHARE = "max-share"

Kind = Literal["category", "range"]


def judge_share(attribution: Attribution, name: str, limit: float) -> BudgetLine:
    """Return whether what ``name`` says takes at most ``limit`` of the steps' kernel time (of all, without steps).

    ``name`` is a category or a range, told apart by what the capture has; ``category:`` or ``range:`` before it says
    which is meant.

    Raises:
        UsageError: the capture has both and ``name`` does not say which.
    """
    by_step = has_measured_steps(attribution)
    whole = sample_steps(attribution, by_step=by_step)
    kind, bare = _tell_kind(attribution, whole, name)
    if not whole.total_ns:
        return broken(MAX_SHARE, "share", limit, "no kernel time was recorded in the steps", name)
    if kind is None:
        return broken(MAX_SHARE, "share", limit, _explain_nothing(bare), name)
    if kind == "range":
        part_ns = sample_steps(attribution, bare, by_step=by_step).total_ns
    else:
        mine = [column for column, key in enumerate(whole.keys) if key.category == bare]
        part_ns = int(whole.kernel_ns[:, mine].sum())
    share = part_ns / whole.total_ns
    of = f"{whole.size} steps" if by_step else "the capture, which has no steps"
    detail = f"{kind} {bare!r}: {part_ns:,} of {whole.total_ns:,} ns of kernel time of {of}"
    if kind == "category":
        detail += _name_ranges_alike(attribution, bare)
    return BudgetLine(MAX_SHARE, name, share, limit, "share", share <= limit, detail)


def _tell_kind(attribution: Attribution, whole: StepSamples, name: str) -> tuple[Kind | None, str]:
    """Return whether a category or a range is meant (None: the capture has neither), and its name."""
    prefix, _, rest = name.partition(":")
    asked: tuple[Kind, ...] = ("category", "range")
    bare = name
    if rest and prefix in asked:
        asked, bare = tuple(kind for kind in asked if kind == prefix), rest
    there: list[Kind] = []
    if "category" in asked and any(key.category == bare for key in whole.keys):
        there.append("category")
    if "range" in asked and _has_range(attribution, bare):
        there.append("range")
    if len(there) > 1:
        raise UsageError(
            f"--max-share {name}: this capture has a category and a range of that name; write category:{name} or"
            f" range:{name}"
        )
    return (there[0] if there else None), bare


def _has_range(attribution: Attribution, name: str) -> bool:
    try:
        return bool(len(select_ranges(attribution, name)))
    except (TraceError, UsageError):
        return False


def _name_ranges_alike(attribution: Attribution, category: str) -> str:
    """Return which ranges are named after a category, whose kernels are told by their own names alone.

    An eager softmax is a chain of elementwise kernels and reductions: its range takes time that its category does not.
    """
    trace = attribution.trace
    names = {trace.names[i] for i in distinct_values(trace.ranges.name).tolist()} - {category}
    alike = sorted(name for name in names if category in name)
    return f"; by kernels' names, unlike range:{alike[0]}" if alike else ""


def _explain_nothing(name: str) -> str:
    if name in CATEGORIES:
        return f"no kernel here is of category {name!r} by its name, and no range is called so"
    return f"there is neither a category nor a range {name!r} (`profkit ranges` lists ranges)"
