"""Sentences about the rows of memory_questions: each with its number, its range, what it is a share of, its command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, cast

from profkit.report.memory_units import format_bytes
from recipes.common.recipe import Row, whole
from recipes.model_memory.cells import describe_cell, describe_layers, name_of

_UNMEASURED = "No peak was measured: of all devices only CUDA's allocator records its history."


def answer_peaks(rows: Sequence[Row]) -> Iterator[str]:
    """Say how peaks grow with the context, and what bf16 changes, at the same batch."""
    measured = [row for row in rows if row.get("allocated_peak_bytes") is not None]
    if not measured:
        yield _UNMEASURED
        return
    sentences = []
    for setting in dict.fromkeys((row["size"], row["passes"], row["dtype"], row["batch"]) for row in measured):
        series = [row for row in measured if (row["size"], row["passes"], row["dtype"], row["batch"]) == setting]
        sentences.append(_growth(sorted(series, key=lambda row: whole(row["context"]))))
    yield _list([*sentences, *_precision(measured)])


def _growth(series: Sequence[Row]) -> str:
    first, last = series[0], series[-1]
    low, high = (whole(row["allocated_peak_bytes"]) for row in (first, last))
    at = f"{first['size']}, {first['passes']}, {first['dtype']}: {format_bytes(low)} allocated at the peak"
    where = f"in {_phase(first)} at context {first['context']}"
    if first is last:
        return f"{at} {where} ({_command(first)})."
    return (
        f"{at} {where}, {format_bytes(high)} in {_phase(last)} at context {last['context']}: "
        f"{high / low:.3g} times as much for {whole(last['context']) / whole(first['context']):.3g} times the context "
        f"({_command(last)})."
    )


def _precision(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a sentence on bf16 against fp32 for each size and extent of a step, at the longest context of both."""
    found: dict[tuple[object, ...], dict[object, Row]] = {}
    for row in sorted(rows, key=lambda row: whole(row["context"])):
        found.setdefault((row["size"], row["passes"], row["context"], row["batch"]), {})[row["dtype"]] = row
    longest = {key[:2]: pair for key, pair in found.items() if {"fp32", "bf16"} <= pair.keys()}
    for (size, passes), pair in longest.items():
        wide, low = whole(pair["fp32"]["allocated_peak_bytes"]), whole(pair["bf16"]["allocated_peak_bytes"])
        copies = max(int(phase["by_category"].get("autocast copies", 0)) for phase in _phases(pair["bf16"]))
        yield (
            f"{size}, {passes}, context {pair['bf16']['context']}: under bf16 autocast the peak is {format_bytes(low)} "
            f"against {format_bytes(wide)} in fp32, {(low - wide) / wide:+.1%} of the latter; the copies of the "
            f"weights in bf16 are predicted to take up to {format_bytes(copies)} ({_command(pair['bf16'])})."
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
            f"{format_bytes(whole(size_bytes))}; seen as the output of a block, {dtype}, in {precisions} "
            f"({_rerun(here[0])})."
        )
    yield _list(sentences) or "Not seen: no forward pass came to its end."


def answer_largest(row: Row) -> Iterator[str]:
    """Say what the largest allocations at a row's peak are, and their share of it."""
    largest = cast("list[dict[str, Any]]", row["largest"])
    peak, together = whole(row["allocated_peak_bytes"]), sum(int(one["bytes"]) for one in largest)
    first = largest[0]
    whose = f" of `{first['owner']}`" if first["owner"] else ""
    yield (
        f"{describe_cell(row)}: the largest allocation at the peak, in {_phase(row)}, is "
        f"{format_bytes(first['bytes'])} of {first['category']}{whose}; the {len(largest)} largest are "
        f"{format_bytes(together)}, {together / peak:.1%} of the {format_bytes(peak)} allocated then ({_command(row)})."
    )


def answer_saved(row: Row) -> Iterator[str]:
    """Say what each block keeps, what the five largest parts are of it, and what the whole model keeps."""
    blocks = cast("list[int]", row["saved_bytes_by_block"])
    parts = [int(part["bytes"]) for part in cast("list[dict[str, Any]]", row["saved_parts"]) if part["made_by"]]
    if len(set(blocks)) == 1:
        each = f"each of the {len(blocks)} blocks keeps {blocks[0]:,} B ({format_bytes(blocks[0])})"
    else:
        each = f"the {len(blocks)} blocks keep {format_bytes(min(blocks))} to {format_bytes(max(blocks))}"
    total, predicted = whole(row["saved_bytes"]), whole(row["predicted_saved_bytes"])
    yield (
        f"{row['size']}, context {row['context']}, {row['dtype']}: {each}; the {len(parts)} largest parts are "
        f"{sum(parts) / max(blocks):.1%} of a block's. All that is kept when the loss is made: {total:,} B counted, "
        f"{predicted:,} B predicted for CUDA, {sum(blocks) / total:.1%} of it in the blocks ({_rerun(row)})."
    )


def answer_checkpoints(group: Sequence[Row]) -> Iterator[str]:
    """Say which number of layers to a checkpoint has the lowest peak, against none."""
    key = "allocated_peak_bytes"
    measured = [row for row in group if row.get(key) is not None]
    how = "measured"
    if len(measured) < len(group):
        key, measured, how = "predicted_peak_bytes", list(group), "predicted"
    none = next((row for row in measured if not row["checkpoint_layers"]), None)
    with_some = [row for row in measured if row["checkpoint_layers"]]
    if none is None or not with_some:
        return
    lowest = min(with_some, key=lambda row: whole(row[key]))
    before, after = whole(none[key]), whole(lowest[key])
    phase = _phase(lowest) if how == "measured" else lowest["predicted_phase"]
    kept = [whole(row["predicted_saved_bytes"]) for row in (none, lowest)]
    command = _command(lowest) if how == "measured" else _rerun(lowest)
    less = f"{(after - before) / before:+.1%}"
    yield (
        f"{describe_cell(none)}: {format_bytes(before)} {how} at the peak without checkpoints; the lowest is "
        f"{format_bytes(after)}, in {phase}, with one every {describe_layers(lowest)}, {less}; what "
        f"is kept when the loss is made is predicted to go from {format_bytes(kept[0])} to {format_bytes(kept[1])} "
        f"({command})."
    )


def answer_predicted(rows: Sequence[Row]) -> Iterator[str]:
    """Say how far measured peaks are from predicted ones, and what adding up all kinds would have said."""
    compared = [row for row in rows if row.get("difference_bytes") is not None]
    sentences = []
    if compared:
        exact = sum(not row["difference_bytes"] for row in compared)
        worst = max(compared, key=lambda row: abs(whole(row["difference_bytes"])))
        off, peak = whole(worst["difference_bytes"]), whole(worst["requested_peak_bytes"])
        sentences.append(
            f"Of {len(compared)} measured peaks {exact} were predicted to the byte, as requested from the allocator; "
            f"the largest difference is {off:,} B, {abs(off) / peak:.2%} of {format_bytes(peak)}, at "
            f"{describe_cell(worst)}; `--predicted` shows it tensor by tensor ({_command(worst)})."
        )
    off_by = [(row, whole(row["added_up_bytes"]) - whole(row["predicted_peak_bytes"])) for row in rows]
    high, low = max(off_by, key=lambda entry: entry[1]), min(off_by, key=lambda entry: entry[1])
    sentences.append(
        "The peak is the highest phase's, not the sum of all kinds: parameters, gradients, AdamW's moments and what is "
        f"kept for backward, added up, would be off by {_signed(low)} to {_signed(high)} of the predicted peak, over "
        f"{len(rows)} rows (columns `added_up_bytes` and `predicted_peak_bytes`)."
    )
    replayed = [row for row in rows if row.get("replay_difference_bytes") is not None]
    if replayed:
        agree = sum(not row["replay_difference_bytes"] for row in replayed)
        sentences.append(
            f"The replayed peak is `torch.cuda.max_memory_allocated()` to the byte in {agree} of {len(replayed)} rows "
            "(column `replay_difference_bytes`)."
        )
    yield _list(sentences)


def _signed(entry: tuple[Row, int]) -> str:
    row, off = entry
    share = off / whole(row["predicted_peak_bytes"])
    return f"{'+' if off > 0 else ''}{format_bytes(off)} ({share:+.1%}, {describe_cell(row)})"


def _phase(row: Row) -> str:
    """Return where a measured peak fell."""
    return str(row["peak_phase"] or "the making of the model")


def _phases(row: Row) -> list[dict[str, Any]]:
    return cast("list[dict[str, Any]]", row["predicted_phases"])


def _rerun(row: Mapping[str, object]) -> str:
    """Return the command that measures a row again."""
    return (
        f"`python -m recipes.memory_questions --device {row['device']} --size {row['size']} --context {row['context']} "
        f"--passes {row['passes']} --dtype {row['dtype']} --checkpoint-layers {row['checkpoint_layers']} "
        f"--batch {row['batch']} -o again`"
    )


def _command(row: Mapping[str, object]) -> str:
    """Return the commands that record a row again and show its memory."""
    return f"{_rerun(row).removesuffix('`')} --keep-captures captures`, then `profkit memory captures/{name_of(row)}`"


def _list(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)
