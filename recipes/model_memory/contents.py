"""Tables of what is in the memory: the largest allocations at a peak, and what a block keeps for backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from profkit.report.formats import Column, render_markdown
from profkit.report.units import format_bytes
from recipes.common.old_tables import build_table
from recipes.common.recipe import Row, whole
from recipes.model_memory.answers import answer_largest, answer_saved

_LARGEST = 10


def tell_size(value: object) -> str | None:
    """Return bytes for people; None of what is not known."""
    return None if value is None else format_bytes(whole(value))


def show_largest(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the largest allocations at each row's peak, those alike together, and the stacks that have most of it."""
    recorded = [row for row in rows if row.get("largest")]
    if not recorded:
        yield "Not known: only CUDA's allocator records its history."
        return
    columns = [
        Column("block", "size"),
        Column("how many", "count"),
        *(Column(name, key, right=False) for name, key in (("category", "category"), ("asked for in", "phase"))),
        *(Column(name, key, right=False) for name, key in (("whose", "owner"), ("stack, innermost first", "label"))),
    ]
    grouped = [Column("blocks together", "size"), Column("how many", "count"), Column("stack", "label", right=False)]
    yield "Sizes are of the allocator's blocks, padding included."
    for row in recorded:
        largest, stacks = cast("list[Row]", row["largest"]), cast("list[Row]", row["stacks"])
        yield answer_largest(row)
        yield render_markdown(build_table(columns, group_alike(largest[:_LARGEST])))
        yield "What has most of the peak, by stack:"
        yield render_markdown(build_table(grouped, [{**one, "size": tell_size(one["bytes"])} for one in stacks]))


def group_alike(largest: Sequence[Row]) -> list[Row]:
    """Return large allocations, those of one size, kind and stack as one row with their count and owners."""
    alike = ("bytes", "category", "phase", "label")
    groups: dict[tuple[object, ...], list[Row]] = {}
    for one in largest:
        groups.setdefault(tuple(one[key] for key in alike), []).append(one)
    rows = []
    for here in groups.values():
        owners = [str(one["owner"]) for one in here if one["owner"]]
        more = f" and {len(owners) - 1} more" if len(owners) > 1 else ""
        size = tell_size(here[0]["bytes"])
        rows.append({**here[0], "size": size, "count": len(here), "owner": owners[0] + more if owners else None})
    return rows


def show_saved(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what a block keeps in each setting, and its largest parts at the longest context of each."""
    which = ("size", "context", "dtype", "batch")
    settings: dict[tuple[object, ...], Row] = {}
    for row in rows:
        if row.get("saved_parts"):
            # Autograd keeps the same whether an optimizer follows or not.
            settings.setdefault(tuple(row[key] for key in which), row)
    counted = list(settings.values())
    if not counted:
        yield "Not counted."
        return
    yield answer_saved(counted)
    columns = [Column(key, key, right=key not in ("size", "dtype")) for key in which]
    columns += [Column("kept by a block", "block"), Column("its largest parts (how many)", "largest")]
    columns += [Column("kept in all", "all"), Column("of it in the blocks", "in_blocks")]
    yield render_markdown(build_table(columns, [{**row, **_tell_saved(row)} for row in counted]))
    columns = [Column("kept", "size"), Column("tensors", "count"), Column("made by", "made_by", right=False)]
    columns += [Column("first saved in", "saved_in", right=False), Column("shape of each", "shape", right=False)]
    columns += [Column("dtype", "dtype", right=False)]
    longest = {(row["size"], row["dtype"]): row for row in sorted(counted, key=lambda row: whole(row["context"]))}
    for row in longest.values():
        yield f"The largest parts of a block's, {row['size']}, context {row['context']}, {row['dtype']}:"
        parts = [_tell_part(part) for part in cast("list[Row]", row["saved_parts"])]
        yield render_markdown(build_table(columns, parts))


def _tell_saved(row: Row) -> Row:
    blocks = cast("list[int]", row["saved_bytes_by_block"])
    parts = [whole(part["bytes"]) for part in cast("list[Row]", row["saved_parts"]) if part["made_by"]]
    low, high = tell_size(min(blocks)), tell_size(max(blocks))
    return {
        "block": f"{low}, each of {len(blocks)}" if low == high else f"{low} to {high}, of {len(blocks)}",
        "largest": f"{sum(parts) / max(blocks):.1%} ({len(parts)})",
        "all": tell_size(row["saved_bytes"]),
        "in_blocks": f"{sum(blocks) / whole(row['saved_bytes']):.1%}",
    }


def _tell_part(part: Row) -> Row:
    shape = cast("list[int] | None", part["shape"])
    told = {**part, "size": tell_size(part["bytes"])}
    return {**told, "made_by": part["made_by"] or "all others", "shape": shape and " × ".join(map(str, shape))}
