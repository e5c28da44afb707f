"""Sentences about the rows of memory_questions: each with its number, its range, what it is a share of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, cast

from profkit.names import OPTIMIZER
from profkit.report.units import format_bytes, four_digits
from recipes.common.recipe import OK, Row, whole
from recipes.model_memory.cells import describe_cell
from recipes.model_memory.predicted import kinds_at_peak
from recipes.whole_model.cells import PASSES

_UNMEASURED = "No peak was measured: of all devices only CUDA's allocator records its history."
MAKING = "the making of the model"


def answer_peaks(rows: Sequence[Row]) -> Iterator[str]:
    """Say what the largest model takes at its longest context, and what bf16 changes at the longest of each size."""
    measured = is_measured(rows)
    if not measured:
        yield _UNMEASURED
        return
    telling = max(measured, key=lambda row: (whole(row["parameters"]), whole(row["context"])))
    same = ("size", "context", "dtype", "batch")
    here = [row for row in measured if all(row[key] == telling[key] for key in same)]
    here.sort(key=lambda row: PASSES.index(cast("Any", row["passes"])))
    peaks = ", ".join(
        f"{row['passes']} {format_bytes(whole(row['allocated_peak_bytes']))} (in {_phase(row)})" for row in here
    )
    what = f"{telling['size']}, context {telling['context']}, {telling['dtype']}, batch {telling['batch']}"
    yield f"{what}, allocated at the peak: {peaks}."
    yield from _optimizers_temporaries(measured)
    yield from _precision(measured)


def is_measured(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that have a measured peak."""
    return [row for row in rows if row.get("requested_peak_bytes") is not None]


def _optimizers_temporaries(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what the temporaries are where the peak is the optimizer's, of the largest such row."""
    there = [row for row in rows if phase_of(row) == row["predicted_phase"] == OPTIMIZER]
    if there:
        row = max(there, key=lambda row: (whole(row["parameters"]), whole(row["context"])))
        size, peak = kinds_at_peak(row)["temporaries"], whole(row["requested_peak_bytes"])
        yield (
            f"Without checkpoints {len(there)} of {len(rows)} measured peaks are the optimizer's, as predicted. There "
            f"{format_bytes(size)} of {format_bytes(peak)} requested, {size / peak:.1%}, are temporaries "
            f"({describe_cell(row)}): `foreach` AdamW takes the square roots of all second moments at once, once more "
            "what the parameters take."
        )


def _precision(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a sentence on bf16 against fp32 for each size and extent of a step, at the longest context of both."""
    found: dict[tuple[object, ...], dict[object, Row]] = {}
    for row in sorted(rows, key=lambda row: whole(row["context"])):
        found.setdefault((row["size"], row["passes"], row["context"], row["batch"]), {})[row["dtype"]] = row
    longest = {key[:2]: pair for key, pair in found.items() if {"fp32", "bf16"} <= pair.keys()}
    for (size, passes), pair in longest.items():
        wide, low = pair["fp32"], pair["bf16"]
        copies = kinds_at_peak(low)["autocast copies"]
        hold = f"{format_bytes(copies)} are copies" if copies else "there are no copies"
        yield (
            f"{size}, {passes}, context {low['context']}, peak under bf16 autocast against fp32: "
            f"{_against(wide, low, 'allocated')}, {_against(wide, low, 'reserved')}. At its predicted "
            f"peak, in {low['predicted_phase']}, {hold} of the weights in bf16."
        )


def _against(wide: Row, low: Row, kind: str) -> str:
    before, after = (whole(row[f"{kind}_peak_bytes"]) for row in (wide, low))
    return f"{kind} {format_bytes(after)} against {format_bytes(before)}, {(after - before) / before:+.1%}"


def answer_padding(rows: Sequence[Row]) -> str:
    """Say how allocated, requested and reserved bytes differ, and by how much at these rows' peaks."""
    padding = [whole(row["allocated_peak_bytes"]) - whole(row["requested_peak_bytes"]) for row in is_measured(rows)]
    return (
        "Requested is what the program asks the allocator for. Allocated is requested and the allocator's padding, "
        f"which depends on what was freed before: {format_bytes(min(padding))} to {format_bytes(max(padding))} at "
        f"these {len(padding)} peaks. Reserved is what the allocator took from the device. Predictions, what is "
        "compared with them, and growth are of requested bytes."
    )


def answer_growth(rows: Sequence[Row]) -> Iterator[str]:
    """Say how peaks grow with the context, in requested bytes: padding differs from run to run."""
    measured = is_measured(rows)
    same = ("size", "passes", "dtype", "batch")
    for setting in dict.fromkeys(tuple(row[key] for key in same) for row in measured):
        series = [row for row in measured if tuple(row[key] for key in same) == setting]
        yield _growth(sorted(series, key=lambda row: whole(row["context"])))


def _growth(series: Sequence[Row]) -> str:
    first, last = series[0], series[-1]
    low, high = (whole(row["requested_peak_bytes"]) for row in (first, last))
    at = f"{first['size']}, {first['passes']}, {first['dtype']}: {format_bytes(low)} requested at the peak"
    where = f"in {phase_of(first)} at context {first['context']}"
    if first is last:
        return f"{at} {where}."
    context = whole(last["context"]) / whole(first["context"])
    return (
        f"{at} {where}, {format_bytes(high)} in {phase_of(last)} at context {last['context']}: "
        f"{four_digits(high / low)} times as much for {context:.3g} times the context."
    )


def answer_residual(rows: Sequence[Row]) -> Iterator[str]:
    """Say how large the tensor is that one block hands to the next."""
    seen: dict[tuple[object, ...], list[Row]] = {}
    sentences = []
    for row in rows:
        if row.get("residual_bytes") is not None:
            key = (row["size"], row["context"], tuple(cast("list[int]", row["residual_shape"])), row["residual_dtype"])
            seen.setdefault((*key, row["residual_bytes"]), []).append(row)
    for (size, context, shape, dtype, size_bytes), here in seen.items():
        lengths = cast("tuple[int, ...]", shape)
        width = whole(size_bytes) // prod(lengths)
        formula = " × ".join(map(str, (*lengths, f"{width} B")))
        precisions = " and ".join(dict.fromkeys(str(row["dtype"]) for row in here))
        sentences.append(
            f"{size} at context {context}: batch × context × d_model × width = {formula} = {whole(size_bytes):,} B = "
            f"{format_bytes(whole(size_bytes))}; seen as the output of a block, {dtype}, in {precisions}."
        )
    yield from sentences


def answer_largest(row: Row) -> str:
    """Say what the largest allocations at a row's peak are, and their share of it."""
    largest = cast("list[dict[str, Any]]", row["largest"])
    peak, together = whole(row["allocated_peak_bytes"]), sum(int(one["bytes"]) for one in largest)
    first = largest[0]
    whose = f" of `{first['owner']}`" if first["owner"] else ""
    return (
        f"{describe_cell(row)}: the largest allocation at the peak, in {_phase(row)}, is "
        f"{format_bytes(first['bytes'])} of {first['category']}{whose}; the {len(largest)} largest are "
        f"{format_bytes(together)}, {together / peak:.1%} of the {format_bytes(peak)} allocated then."
    )


def answer_saved(rows: Sequence[Row]) -> str:
    """Say whether all that is kept, as counted, is what was predicted for CUDA."""
    off = [(row, whole(row["saved_bytes"]) - whole(row["predicted_saved_bytes"])) for row in rows]
    exact = sum(not difference for _, difference in off)
    text = "All that is kept when the loss is made, counted tensor by tensor, is what was predicted for CUDA to the "
    text += f"byte in {exact} of {len(rows)} rows"
    if exact == len(rows):
        return f"{text}."
    row, most = max(off, key=lambda entry: abs(entry[1]))
    share = most / whole(row["saved_bytes"])
    return f"{text}; most off is {describe_cell(row)}, by {most:,} B, {share:+.2%} of what was counted."


def answer_checkpoints(group: Sequence[Row]) -> Iterator[str]:
    """Say which numbers of layers to a checkpoint have the lowest peak, against none; of measured rows if there are."""
    key, how, there = "requested_peak_bytes", "measured", is_measured(group)
    if all(row["checkpoint_layers"] for row in there) or not any(row["checkpoint_layers"] for row in there):
        key, how, there = "predicted_peak_bytes", "predicted", list(group)
    none = next((row for row in there if not row["checkpoint_layers"]), None)
    with_some = [row for row in there if row["checkpoint_layers"]]
    if none is None or not with_some:
        return
    before, after = whole(none[key]), min(whole(row[key]) for row in with_some)
    lowest = sorted((row for row in with_some if row[key] == after), key=lambda row: whole(row["checkpoint_layers"]))
    kept = format_bytes(whole(none["predicted_saved_bytes"]))
    left_out = [str(row["checkpoint_layers"]) for row in group if row not in there]
    yield (
        f"{describe_cell(none)}: {format_bytes(before)} requested ({how}) at the peak without checkpoints, in "
        f"{_phase_by(none, how)}; {format_bytes(after)} at the lowest with them, {(after - before) / before:+.1%}, "
        f"{_ties(lowest, how)}. Kept when the loss is made: {kept} without, "
        f"{_kept(lowest)} with these, by prediction." + f" Not measured: {', '.join(left_out)} layers." * bool(left_out)
    )


def _ties(lowest: Sequence[Row], how: str) -> str:
    """Return which rows share the lowest peak, and in which phase that is."""
    layers = [str(row["checkpoint_layers"]) for row in lowest]
    phases = " or ".join(dict.fromkeys(_phase_by(row, how) for row in lowest))
    if len(layers) == 1:
        return f"one every {'layer' if layers == ['1'] else f'{layers[0]} layers'}, in {phases}"
    return (
        f"the same for one every {', '.join(layers[:-1])} and {layers[-1]} layers, for the peak falls in {phases} there"
    )


def _kept(rows: Sequence[Row]) -> str:
    sizes = [whole(row["predicted_saved_bytes"]) for row in rows]
    low, high = format_bytes(min(sizes)), format_bytes(max(sizes))
    return low if low == high else f"{low} to {high}"


def _phase_by(row: Row, how: str) -> str:
    return phase_of(row) if how == "measured" else str(row["predicted_phase"])


def answer_predicted(rows: Sequence[Row]) -> Iterator[str]:
    """Say how far measured peaks are from predicted ones, and what the usual sum would have said."""
    compared = [row for row in rows if row.get("difference_bytes") is not None]
    if compared:
        exact = sum(not row["difference_bytes"] for row in compared)
        text = f"Of {len(compared)} measured peaks {exact} were predicted to the byte, as requested from the allocator"
        worst = max(compared, key=lambda row: abs(whole(row["difference_bytes"])))
        off, peak = whole(worst["difference_bytes"]), whole(worst["requested_peak_bytes"])
        if off:
            text += f"; the largest difference is {off:,} B, {abs(off) / peak:.2%} of {format_bytes(peak)}, at "
            text += f"{describe_cell(worst)}"
        yield f"{text}."
    yield from _usual_sum(rows)
    replayed = [row for row in rows if row.get("replay_difference_bytes") is not None]
    if replayed:
        agree = sum(not row["replay_difference_bytes"] for row in replayed)
        yield (
            f"The replayed peak is `torch.cuda.max_memory_allocated()` to the byte in {agree} of {len(replayed)} rows "
            "(column `replay_difference_bytes`)."
        )


def _usual_sum(rows: Sequence[Row]) -> Iterator[str]:
    """Yield how far the usual sum is off the peaks of rows that were run, those with checkpoints apart."""
    there, how = is_measured(rows), "requested"
    if not there:
        there, how = [row for row in rows if row["status"] == OK], "predicted"
    plain, checkpointed = ([row for row in there if bool(row["checkpoint_layers"]) == some] for some in (False, True))
    if plain:
        text = f"The usual sum is off by {_extremes(plain, how)} of the {how} peak, over {len(plain)} rows without"
        text += " checkpoints: a peak is the highest phase's, not a sum of all kinds."
        if checkpointed:
            text += f" With checkpoints, over {len(checkpointed)} rows, by {_extremes(checkpointed, how)}."
        yield text


def _extremes(rows: Sequence[Row], how: str) -> str:
    off = [(usual_sum_off(row, how), row) for row in rows]
    low, high = min(off, key=lambda entry: entry[0]), max(off, key=lambda entry: entry[0])
    one, other = (f"{share:+.1%} ({describe_cell(row)})" for share, row in (low, high))
    return one if low[1] is high[1] else f"{one} to {other}"


def usual_sum_off(row: Row, how: str) -> float:
    """Return how far the usual sum is above a row's peak, ``requested`` or ``predicted``, as a share of that."""
    peak = whole(row[f"{how}_peak_bytes"])
    return (whole(row["added_up_bytes"]) - peak) / peak


def phase_of(row: Row) -> str:
    """Return where the peak of requested bytes fell: the highest phase, unless all are lower."""
    phases = cast("list[dict[str, Any]] | None", row.get("requested_phases"))
    if phases is None:
        return _phase(row)
    highest = max(int(phase["requested_bytes"]) for phase in phases)
    return str(row["requested_phase"]) if whole(row["requested_peak_bytes"]) <= highest else MAKING


def _phase(row: Row) -> str:
    """Return where the peak of allocated bytes fell."""
    return str(row["peak_phase"] or MAKING)
