"""What end_to_end says about its rows: times by size and context, what stands out, pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from profkit.report.formats import render_markdown
from profkit.report.units import format_count
from recipes.common.old_tables import build_pivot
from recipes.common.recipe import NOT_RUN, OK, Report, Row, whole
from recipes.common.tables import listed
from recipes.detectors.inspect import inspect_tables
from recipes.detectors.tables import build_table as build_benchmark
from recipes.detectors.times import differs_at_first
from recipes.whole_model.cells import FORWARD_BACKWARD, FORWARD_ONLY, KEYS, TRAIN
from recipes.whole_model.pictures import draw_times, draw_warmup

PARTS = ("forward", "loss", "backward", "optimizer", "forward_backward", "step")
_SHOWN_TO_DETECTORS = (*KEYS, "parameters", *(f"{part}{kind}_ms" for part in PARTS for kind in ("", "_mean", "_std")))
_TABLES = ((FORWARD_BACKWARD, "forward"), (FORWARD_BACKWARD, "backward"), (FORWARD_ONLY, "step"), (TRAIN, "step"))
_WORST = 3


def report(rows: Sequence[Row], _machine: Mapping[str, object]) -> Report:
    """Return times by size and context, what the detectors say, and pictures of times and of the first steps."""
    sections = [*_pivots(rows), "## What the detectors say", listed(remark(rows)) or "Nothing."]
    return Report(sections, {"times.png": draw_times(rows), "warmup.png": draw_warmup(rows)})


def remark(rows: Sequence[Row]) -> list[str]:
    """Return what to know when reading the table, mistakes first."""
    shown = [{key: row.get(key) for key in _SHOWN_TO_DETECTORS} for row in rows]
    findings = inspect_tables([build_benchmark("this table", shown)])
    mistakes = [finding.message for finding in findings if not finding.is_note]
    notes = [finding.message for finding in findings if finding.is_note]
    return [*mistakes, *_first_samples(rows), *_happened_inside(rows), *notes]


def _pivots(rows: Sequence[Row]) -> Iterator[str]:
    for passes, part in _TABLES:
        some = [row for row in rows if row["passes"] == passes]
        if not some:
            continue
        yield f"## {passes}: {part}, median ms by context"
        for setting in dict.fromkeys((row["dtype"], row["mode"], row["warmup"]) for row in some):
            here = [row for row in some if (row["dtype"], row["mode"], row["warmup"]) == setting]
            dtype, mode, warmup = setting
            if all(row["status"] == NOT_RUN for row in here):
                yield f"{dtype}, {mode}, warm-up {warmup}: not run ({format_count(len(here), 'cell')})."
            else:
                table = build_pivot(here, "context", ["size"], f"{part}_ms", digits=4)
                yield f"{dtype}, {mode}, warm-up {warmup}:\n\n{render_markdown(table)}"


def _first_samples(rows: Sequence[Row]) -> Iterator[str]:
    """Yield, for each part, the rows whose first sample is an outlier: those where it is the most times the median."""
    for part in ("forward", "backward", "optimizer"):
        found, timed = [], 0
        for row in rows:
            samples = row.get(f"{part}_samples_ms")
            timed += isinstance(samples, list)
            if isinstance(samples, list) and differs_at_first(samples):
                found.append((samples[0] / float(str(row[f"{part}_ms"])), samples[0], row))
        worst = sorted(found, key=lambda entry: entry[0], reverse=True)[:_WORST]
        told = "; ".join(
            f"{first:.4g} ms, {times:.3g} times the median, at {_name(row)}" for times, first, row in worst
        )
        if found:
            why = ["the warm-up was missing or too short"] * any(times > 1 for times, _, _ in found)
            why += ["where the first is the fastest, something slowed the later ones"] * any(t < 1 for t, _, _ in found)
            yield (
                f"{part}: the first sample is an outlier in {len(found)} of {timed} rows, most: {told}; "
                f"{'; '.join(why)}"
            )


def _happened_inside(rows: Sequence[Row]) -> Iterator[str]:
    for key, what, why in (
        ("compiled_graphs", "graphs were compiled", "the times hold compilation"),
        ("allocator_retries", "allocations were tried again after the cache was freed", "the memory was all but full"),
    ):
        found = [(whole(row[key]), row) for row in rows if row.get(key)]
        told = "; ".join(f"{count} at {_name(row)}" for count, row in found[:_WORST])
        if found:
            yield f"{what} within the timed steps in {len(found)} of {_measured(rows)} rows: {told}; {why}"


def _measured(rows: Sequence[Row]) -> int:
    return sum(row["status"] == OK for row in rows)


def _name(row: Row) -> str:
    size, context, passes, dtype, mode, warmup = (row[key] for key in KEYS[:6])
    return f"{size} {context} {passes} {dtype} {mode}, warm-up {warmup}"
