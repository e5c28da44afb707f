"""What was fused into what, told of one pair of attention and one of the model, by the names of kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from profkit.report.formats import Column, render_markdown
from profkit.report.units import format_count, format_ns
from recipes.common.old_tables import DASH, build_table
from recipes.compilation.cells import ATTENTION, MODEL
from recipes.compilation.pairs import Fused, Pair, compare_phases, list_fused
from recipes.compilation.words import name_pair, noun_of, show_totals
from recipes.compilation.work import Kernel, kernels_of
from recipes.whole_model.cells import FORWARD_ONLY

_MOST_LINES = 15
_MOST_NAMES = 5


def tell_fusions(pairs: Sequence[Pair]) -> Iterator[str]:
    """Yield the tables of one pair of attention and one of the model: the first of each that runs backward."""
    for what in (ATTENTION, MODEL):
        own = [pair for pair in pairs if pair.eager["what"] == what]
        pair = next((pair for pair in own if pair.eager["passes"] != FORWARD_ONLY), next(iter(own), None))
        if pair is None:
            continue
        noun = noun_of(pair)
        yield f"## What fused into what: {name_pair(pair)}"
        yield "What Inductor made, by the operators that its name says are in it:"
        yield _table_generated(pair, noun)
        yield (
            f"The operators of which compiled code launches fewer {noun}s, and the generated {noun}s that name them; "
            "one may stand for several operators, so that their times do not add up:"
        )
        yield _table_operators(pair, noun)


def _table_generated(pair: Pair, noun: str) -> str:
    made = [each for each in kernels_of(pair.compiled) if each.is_generated]
    lines = [
        {
            **{"phase": each.phase, "kernel": _shorten(each), "count": each.count, "time": format_ns(each.total_ns)},
            "fused": ", ".join(each.fused) or DASH,
        }
        for each in sorted(made, key=lambda each: -each.total_ns)[:_MOST_LINES]
    ]
    rest = len(made) - len(lines)
    columns = [Column("phase", "phase", right=False), Column(f"generated {noun}", "kernel", right=False)]
    columns += [Column("count", "count"), Column("time", "time"), Column("fused in it", "fused", right=False)]
    return render_markdown(build_table(columns, lines)) + (f"\n\n{rest} more." if rest else "")


def _table_operators(pair: Pair, noun: str) -> str:
    found = [(change.phase, each) for change in compare_phases(pair) for each in list_fused(pair, change.phase)]
    named = [(phase, each) for phase, each in found if each.kernels]
    lines = [
        {
            **{"phase": phase, "operator": each.operator, "kernels": _name_kernels(each)},
            **{"eager": show_totals(each.eager), "left": show_totals(each.left)},
        }
        for phase, each in sorted(named, key=lambda entry: -entry[1].eager[1])[:_MOST_LINES]
    ]
    columns = [Column("phase", "phase", right=False), Column("operator", "operator", right=False)]
    columns += [Column(f"{noun}s eager", "eager"), Column("compiled, by itself", "left")]
    columns += [Column(f"in generated {noun}s", "kernels", right=False)]
    others = [each for _, each in found if not each.kernels]
    parts = [f"{len(named) - len(lines)} more."] if len(named) > len(lines) else []
    if others:
        gone = (
            sum(each.eager[0] - each.left[0] for each in others),
            sum(each.eager[1] - each.left[1] for each in others),
        )
        names = list(dict.fromkeys(each.operator for each in others))
        shown = [*names[:_MOST_NAMES], *["…"] * (len(names) > _MOST_NAMES)]
        parts.append(
            f"{show_totals(gone, noun)} fewer of {format_count(len(names), 'operator')} that no generated {noun} "
            f"names ({', '.join(shown)})."
        )
    return "\n\n".join([render_markdown(build_table(columns, lines)), *parts])


def _name_kernels(fused: Fused) -> str:
    shown = [f"{each.count} × {_shorten(each)}" for each in fused.kernels[:2]]
    return ", ".join([*shown, *([f"{len(fused.kernels) - 2} more"] if len(fused.kernels) > 2 else [])])


def _shorten(kernel: Kernel) -> str:
    """Return a generated kernel's name without the operators, which stand elsewhere: ``triton_poi_…_0``."""
    head, _, rest = kernel.name.partition("fused_")
    return f"{head}…_{rest.rpartition('_')[2]}" if rest else kernel.name
