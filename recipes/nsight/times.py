"""(a): what the phases take by the trace, by Python's clock in the same steps, and without a profiler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from profkit.names import BACKWARD, FORWARD
from profkit.report.units import format_count, format_share
from recipes.common.old_tables import DASH
from recipes.common.recipe import LAUNCH_BOUND as BUSY
from recipes.common.recipe import OK
from recipes.nsight.cells import INFERENCE, TRAIN
from recipes.nsight.commands import find_templates, show_clock, show_kernels, show_walls
from recipes.nsight.words import (
    DOING,
    Answer,
    Measured,
    describe,
    measure_noun,
    ms,
    pair_rows,
    profiler_name,
    render_lines,
)

TIMED = ((TRAIN, FORWARD), (TRAIN, BACKWARD), (INFERENCE, FORWARD))
"""What is timed: which steps, and which phase of them."""

UNEVEN = 0.20
"""Samples that range over more of their median than this do not tell a ratio."""
_SAME_WORK = 0.02
_APART = 0.20


@dataclass(frozen=True)
class Ratio:
    """A phase's time by the trace over Python's without a profiler, and what there is to doubt about it.

    ``kernels_ms`` is the phase's kernel time; None where it is not known, or where there is no GPU. ``holds_loss`` says
    that it is backward's with the loss's: then it is at most that, and so is the share of a time that kernels fill.
    ``is_uneven`` says that the recorded or the unprofiled samples range over more than a fifth of their median. ``low``
    is the shortest recorded sample over the longest unprofiled one, ``high`` the longest over the shortest.
    """

    row: Measured
    phase: str
    value: float
    kernels_ms: float | None
    holds_loss: bool
    is_uneven: bool
    low: float
    high: float

    @property
    def busy(self) -> float | None:
        """The share of the unprofiled time that kernels fill."""
        return self._fill("clean")

    @property
    def busy_recorded(self) -> float | None:
        """The share of the time by the trace that kernels fill."""
        return self._fill("recorded")

    def _fill(self, kind: str) -> float | None:
        return None if self.kernels_ms is None else self.kernels_ms / float(self.row[f"{self.phase}_{kind}_ms"])

    @property
    def is_launch_bound(self) -> bool:
        """Whether launches bound the steps without a profiler, as far as is known."""
        return self.busy is not None and self.busy < BUSY

    @property
    def is_slowed(self) -> bool:
        """Whether launches bound the recorded steps, and only them, as far as is known."""
        return not self.is_launch_bound and self.busy_recorded is not None and self.busy_recorded < BUSY

    @property
    def is_doubtful(self) -> bool:
        """Whether it depends on the host how large the ratio is."""
        return self.is_launch_bound or self.is_slowed or self.is_uneven

    @property
    def is_unknown(self) -> bool:
        """Whether it is of a GPU whose kernel time is not known."""
        return self.busy is None and self.row.get("measure") == "gpu-kernel"


def find_ratios(rows: Sequence[Measured], passes: str, phase: str) -> list[Ratio]:
    """Return the ratios of a phase in the rows that have one."""
    return [
        compare_times(row, phase) for row in rows if row["passes"] == passes and row.get(f"{phase}_ratio") is not None
    ]


def compare_times(row: Measured, phase: str) -> Ratio:
    """Return the ratio of a row's phase."""
    recorded, clean = (row[f"{phase}_{kind}_samples_ms"] for kind in ("recorded", "clean"))
    kernels_ms, holds_loss = find_kernel_time(row, phase) if row.get("measure") == "gpu-kernel" else (None, False)
    return Ratio(
        row=row,
        phase=phase,
        value=row[f"{phase}_ratio"],
        kernels_ms=kernels_ms,
        holds_loss=holds_loss,
        is_uneven=any(max(some) - min(some) > UNEVEN * median(some) for some in (recorded, clean)),
        low=min(recorded) / max(clean),
        high=max(recorded) / min(clean),
    )


def find_kernel_time(row: Measured, phase: str) -> tuple[float | None, bool]:
    """Return a phase's kernel time in ms, None where it is not known, and whether it holds the loss's too.

    Rows of earlier captures have none of backward's own: there it is what forward, loss and backward have, less
    forward's.
    """
    known, forward, both = (row.get(key) for key in (f"{phase}_kernel_ms", "forward_kernel_ms", "forward_backward"))
    if known is not None or phase != BACKWARD or forward is None or not both or not both["instances"]:
        return known, False
    return both["total_ns"] / both["instances"] / 1e6 - forward, True


def answer_times(rows: Sequence[Measured]) -> Answer:
    """Return what is said to (a); cells that were not measured show in the table as what they are."""
    ratios = [ratio for timed in TIMED for ratio in find_ratios(rows, *timed)]
    if not ratios:
        return Answer([], [], [])
    apart = [pair for pair in pair_rows(rows) if _is_apart(*pair)]
    told = list({id(ratio.row): ratio.row for ratio in ratios}.values())
    ends = {id(ratio): ratio for ratio in (choose(ratios, key=_value) for choose in (min, max))}
    return Answer(
        short=[*_summarize(rows, ratios), *_count_apart(apart, rows)],
        blocks=[_explain(ratios), _tabulate(rows), *map(tell_times, ends.values()), *_list_apart(apart)],
        commands=[
            *find_templates(told, lambda row: [show_walls(row, FORWARD)]),
            *find_templates((ratio.row for ratio in ratios if ratio.phase == BACKWARD), _show_backward),
            *find_templates((ratio.row for ratio in ratios if ratio.holds_loss), _show_both),
            *find_templates(told, lambda row: [show_clock(row)]),
        ],
    )


def _show_backward(row: Measured) -> list[str]:
    return [show_walls(row, BACKWARD)]


def _show_both(row: Measured) -> list[str]:
    return [show_kernels(row, row["forward_backward"], "--per-instance", "--top", "1")]


def _summarize(rows: Sequence[Measured], ratios: Sequence[Ratio]) -> Iterator[str]:
    apart = max(abs(r.row[f"{r.phase}_recorded_ms"] / r.row[f"{r.phase}_python_ms"] - 1) for r in ratios)
    profiler = profiler_name(ratios[0].row)
    yield f"In the same steps {profiler} and Python's clock differ by {format_share(apart)} at most."
    parts = [
        f"{_extent(some)} in `{phase}` of {DOING[passes]}"
        for passes, phase in TIMED
        if (some := find_ratios(rows, passes, phase))
    ]
    yield f"Recorded times over unprofiled ones are {', '.join(parts)}."
    count = format_count(len(ratios), "ratio")
    unknown = sum(ratio.is_unknown for ratio in ratios)
    known = [ratio for ratio in ratios if not ratio.is_unknown]
    slowed = [ratio for ratio in known if ratio.is_slowed and not ratio.is_uneven]
    telling = [ratio for ratio in known if not ratio.is_doubtful]
    aside = f"; of {unknown} the kernel time is not known" if unknown else ""
    if any(ratio.busy is not None for ratio in known):
        if telling:
            yield (
                f"Where kernels have {BUSY:.0%} or more of both, and samples range over no more than {UNEVEN:.0%} of "
                f"their median, they are {_extent(telling)} ({len(telling)} of {count}{_count_bounds(telling)}{aside})."
            )
        if slowed:
            yield (
                f"Where they have that of the unprofiled time alone they are {_extent(slowed)} ({len(slowed)} of "
                f"{count}{_count_bounds(slowed)}): while recording, launches came too slowly to keep the GPU busy."
            )
    elif telling and len(telling) < len(ratios):
        yield (
            f"Where samples range over no more than {UNEVEN:.0%} of their median they are {_extent(telling)} "
            f"({len(telling)} of {count}{aside})."
        )


def _count_bounds(ratios: Sequence[Ratio]) -> str:
    count = sum(ratio.holds_loss for ratio in ratios)
    return f", {count} of them of backward, whose kernel time holds the loss's" if count else ""


def _is_apart(inference: Measured, training: Measured) -> bool:
    """Return whether forward took one time in training and another in inference, unprofiled, for the same kernels."""
    if training.get("forward_clean_ms") is None or inference.get("forward_clean_ms") is None:
        return False
    shorter, longer = sorted([training["forward_clean_ms"], inference["forward_clean_ms"]])
    return _differ((inference, training)) <= _SAME_WORK and longer > (1 + _APART) * shorter


def _differ(pair: tuple[Measured, Measured]) -> float:
    """Return by how much the kernel times of forward differ."""
    inference, training = pair
    return abs(float(training["forward_kernel_ms"] / inference["forward_kernel_ms"]) - 1)


def _count_apart(apart: Sequence[tuple[Measured, Measured]], rows: Sequence[Measured]) -> Iterator[str]:
    if apart:
        cells = format_count(len(pair_rows(rows)), "cell")
        yield (
            f"Without a profiler `forward` of training and of inference differ by more than {_APART:.0%} in "
            f"{len(apart)} of {cells}, though their {measure_noun(apart[0][1])} times agree within "
            f"{format_share(max(map(_differ, apart)))}: it is the host's part that differs."
        )


def _list_apart(apart: Sequence[tuple[Measured, Measured]]) -> Iterator[str]:
    if apart:
        found = (
            f"{describe(training)}: {ms(training['forward_clean_ms'])} against {ms(inference['forward_clean_ms'])}"
            for inference, training in apart
        )
        yield (
            f"Unprofiled `forward` of training against that of inference, where they are more than {_APART:.0%} apart: "
            f"{'; '.join(found)}."
        )


def _explain(ratios: Sequence[Ratio]) -> str:
    """Return what the table shows and what its marks mean."""
    profiler = profiler_name(ratios[0].row)
    text = (
        f"The time of a phase's range by {profiler} over its time by Python's clock without a profiler, in a process "
        "of its own, both medians. "
    )
    if any(ratio.row.get("measure") == "gpu-kernel" for ratio in ratios):
        text += (
            f"In brackets how much of the unprofiled time is kernel time. \\*: under {BUSY:.0%}, so that launches "
            f"bound the steps and the host's speed decides. ‡: that of the recorded time alone is under {BUSY:.0%}. "
        )
    if any(ratio.holds_loss for ratio in ratios):
        text += (
            "≤: backward's kernel time is what forward, loss and backward have, less forward's; it holds the loss's "
            "few kernels, so backward's own fill that much at most. "
        )
    return f"{text}†: recorded or unprofiled samples range over more than {UNEVEN:.0%} of their median."


def _tabulate(rows: Sequence[Measured]) -> str:
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    lines = []
    for passes, phase in TIMED:
        some = {(row["size"], row["context"]): row for row in rows if row["passes"] == passes}
        for context in sorted({row["context"] for row in some.values()}):
            cells = [_show(some.get((size, context)), phase) for size in sizes]
            lines.append([f"{DOING[passes]}, {phase}", str(context), *cells])
    return render_lines(["steps, phase", "context", *sizes], lines, ["steps, phase"])


def _show(row: Measured | None, phase: str) -> str:
    if row is None or row.get(f"{phase}_ratio") is None:
        return DASH if row is None or row["status"] == OK else row["status"]
    ratio = compare_times(row, phase)
    marks = "*" * ratio.is_launch_bound + "‡" * ratio.is_slowed + "†" * ratio.is_uneven
    busy = DASH if ratio.busy is None else f"{'≤' * ratio.holds_loss}{ratio.busy:.0%}"
    return f"{ratio.value:.2f}{f' ({busy})' * (row.get('measure') == 'gpu-kernel')}{marks}"


def tell_times(ratio: Ratio) -> str:
    """Return the times behind a ratio, with the samples' ranges."""
    row, phase = ratio.row, ratio.phase
    recorded, clean = (row[f"{phase}_{kind}_samples_ms"] for kind in ("recorded", "clean"))
    owner = "its kernels and the loss's" if ratio.holds_loss else "its kernels"
    kernels = "" if ratio.kernels_ms is None else f"; {owner} take {ms(ratio.kernels_ms)}"
    return (
        f"{describe(row)}, {DOING[row['passes']]}: `{phase}` took {ms(row[f'{phase}_recorded_ms'])} by "
        f"{profiler_name(row)} (wall time of the range, median of {len(recorded)} steps, {_range(recorded)}), "
        f"{ms(row[f'{phase}_python_ms'])} by Python's clock in the same steps and {ms(row[f'{phase}_clean_ms'])} by "
        f"Python's clock without a profiler (median of {len(clean)} steps, {_range(clean)}): {ratio.value:.2f} times "
        f"that{kernels}."
    )


def _range(samples: Sequence[float]) -> str:
    return f"{ms(min(samples))} to {ms(max(samples))}"


def _value(ratio: Ratio) -> float:
    return ratio.value


def _extent(ratios: Sequence[Ratio]) -> str:
    low, high = min(ratios, key=_value), max(ratios, key=_value)
    told = [f"{ratio.value:.2f} ({describe(ratio.row)})" for ratio in (low, high)]
    return told[0] if low is high else " to ".join(told)
