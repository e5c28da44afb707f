"""The document of ``profkit whatif``: the peaks of each case, whether they fit, and what an edited peak is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import PurePath

from profkit.analysis.step_replay.predict import Prediction
from profkit.analysis.whatif.answers import Case, WhatIf
from profkit.analysis.whatif.apply import EditedPeak, PartChange
from profkit.errors import Finding
from profkit.report.commands.steps import time_parts, time_table
from profkit.report.document import Column, Document, Lines, Row, Table
from profkit.report.units import BYTES, PLAIN, SIGNED_BYTES, TEXT, format_bytes, format_exactly

_EXACT = (
    "allocator",
    "edits",
    "requested_peak_bytes",
    "allocated_peak_bytes",
    "reserved_peak_bytes",
    "exact",
    "requested_low_bytes",
    "requested_high_bytes",
    "allocated_low_bytes",
    "allocated_high_bytes",
    "reserved_low_bytes",
    "reserved_high_bytes",
    "phase",
    "fits",
)
_SCHEMA = 2
_FITS = {True: "yes", False: "no", None: "perhaps"}
_CAPACITIES = {
    "asked": "--capacity",
    "seen": "the most that CUDA could give it in this run",
    "gpu": "the recorded GPU's memory",
}
_WORTH_A_TRY = 0.01
"""Of the reserved peak: a smaller saving is no reason to change a setting."""


def build_prediction_document(result: Prediction) -> Document:
    """Return the step's time and the peak of memory after edits; CSV holds the peaks, or the time alone."""
    time = [] if result.time is None else list(time_parts(result.time))
    data = {"time": None if result.time is None else result.time.to_dict(), "memory": None}
    if result.memory is not None:
        memory = build_whatif_document(result.memory)
        parts, data = [*time, *memory.parts], {**memory.data, "time": data["time"]}
        return replace(memory, parts=parts, data=data)
    notes = [Lines([f"Memory: {result.memory_note}"])] if result.memory_note else []
    return Document("whatif", data, [*time, *notes], time_table(result.time), schema=_SCHEMA)


def build_whatif_document(result: WhatIf) -> Document:
    """Return the table of cases, today's first, and what its figures rest on."""
    today = result.cases[0]
    shown = _changed_cases(result)
    hidden = [case for case in result.cases if case not in shown]
    is_same = all(case.requested_peak_bytes == today.requested_peak_bytes for case in result.cases)
    columns = [
        Column("name", "allocator" if result.edited is None else "program", TEXT, flexible=True),
        Column("requested", "requested", PLAIN, wide=is_same),
        Column("allocated", "allocated", PLAIN),
        Column("reserved", "reserved", PLAIN),
        Column("change", "change", SIGNED_BYTES),
    ]
    if result.capacity_bytes is not None or any(case.fits is not None for case in result.cases):
        columns.append(Column("whether_fits", "fits", TEXT))
    parts: list[Table | Lines] = [
        Lines(_head(result), "head"),
        Table(columns, [_row(result, case) for case in shown]),
        *_edited_parts(result),
        Lines(_notes(result, hidden)),
    ]
    data = {
        "snapshot": result.snapshot,
        "device": result.device,
        "identity": asdict(result.identity),
        "capacity_bytes": result.capacity_bytes,
        "cases": [asdict(case) for case in result.cases],
        **({} if result.edited is None else {"edited": asdict(result.edited)}),
        **({} if result.search is None else {"fit": result.search}),
    }
    exact = Table((), [_row(result, case) for case in result.cases], exact=_EXACT)
    body = {"time": None, "memory": data}
    count = result.identity.wrong_address_count
    wrong = Finding(
        "not-identical",
        f"the simulator chose {count:,} other addresses than the recorded allocator ({result.identity.reason}):"
        " it predicts no peaks, only lower bounds",
    )
    return Document("whatif", body, parts, exact, [] if result.identity.exact else [wrong], schema=_SCHEMA)


def _changed_cases(result: WhatIf) -> list[Case]:
    today, *others = result.cases
    unchanged = [case for case in others if _compared(case) == _compared(today)]
    return [today, *(case for case in others if len(unchanged) < 2 or case not in unchanged)]


def _compared(case: Case) -> tuple[object, ...]:
    return case.allocated_range_bytes, case.reserved_range_bytes, case.requested_peak_bytes, case.fits


def _row(result: WhatIf, case: Case) -> Row:
    today, change = result.cases[0], None
    if case is not today and case.reserved_peak_bytes is not None and today.reserved_peak_bytes is not None:
        change = case.reserved_peak_bytes - today.reserved_peak_bytes
    ranges = {
        f"{kind}_{end}_bytes": size
        for kind in ("requested", "allocated", "reserved")
        for end, size in zip(("low", "high"), getattr(case, f"{kind}_range_bytes"), strict=True)
    }
    return {
        **asdict(case),
        "edits": " ".join(case.edits),
        "name": _name_case(case) if case is not today else f"today: {_name_case(case)}",
        "requested": _peak(case.requested_range_bytes, case.exact or not case.edits),
        "allocated": _peak(case.allocated_range_bytes, case.exact),
        "reserved": _peak(case.reserved_range_bytes, case.exact),
        "change": change,
        "whether_fits": _FITS[case.fits] if case.fits is not None or result.capacity_bytes is not None else None,
        **ranges,
    }


def _name_case(case: Case) -> str:
    if case.edits:
        return ", ".join(filter(None, ["edited", case.allocator]))
    return case.allocator or "default settings"


def _peak(both: tuple[int, int | None], exact: bool) -> str:
    """Return a peak, or both ends of its range in one unit: ``5.814–5.839 GiB``."""
    low, high = both
    if high is None:
        return f"≥ {format_bytes(low)}"
    small, large = format_bytes(low), format_bytes(high)
    if small == large:
        return large if exact else f"≈ {large}"
    same_unit = small.rpartition(" ")[2] == large.rpartition(" ")[2]
    return f"{small.rpartition(' ')[0] if same_unit else small}–{large}"


def _head(result: WhatIf) -> Iterator[str]:
    requested = format_exactly(result.cases[0].requested_peak_bytes)
    yield f"{PurePath(result.snapshot).name}, device {result.device}: {requested} requested at the peak"
    if result.identity.exact:
        yield "Checked: under today's settings the simulator gives every recorded address and both peaks"


def _notes(result: WhatIf, hidden: list[Case]) -> Iterator[str]:
    today, *cases = result.cases
    if hidden:
        yield f"No change: {', '.join(map(_name_case, hidden))}"
    if any(case.reserved_peak_bytes is not None for case in cases):
        yield "change: of the reserved peak"
    if any(case.allocated_peak_bytes is not None and not case.exact for case in cases):
        start = "" if result.history_is_complete else ", and of what was cached before the recording"
        start += "" if result.edited is None else ", and of what is not known of an edit"
        yield f"A range, or ≈, shows the effect of where CUDA puts segments{start}; other figures are exact"
    if result.capacity_bytes is not None and result.capacity_from is not None:
        room = f"{format_bytes(result.capacity_bytes)} ({_CAPACITIES[result.capacity_from]})"
        yield f"fits: PyTorch stays within {room}; CUDA itself needs some more"
    elif today.fits is False:
        yield "fits: unknown, because the program had a limit of its own; name it with --capacity"
    failed: dict[tuple[int, bool], list[str]] = {}
    for case in _changed_cases(result):
        if case.failed_request_bytes is not None:
            kind = case.failed_request_bytes, case.fits is None
            failed.setdefault(kind, []).append("today" if case is today else _name_case(case))
    for (size, is_unsure), names in failed.items():
        yield f"A request for {format_exactly(size)} {'may fail' if is_unsure else 'fails'}: {', '.join(names)}"
    best = min(cases, key=_highest, default=today)
    saves = 1 - _highest(best) / max(_highest(today), 1.0)
    if (saves >= _WORTH_A_TRY or (saves > 0 and best.fits and not today.fits)) and not best.edits:
        yield f"Try: PYTORCH_CUDA_ALLOC_CONF={best.allocator or repr('')}"


def _highest(case: Case) -> float:
    high = case.reserved_range_bytes[1]
    return float("inf") if high is None else high


_TOP_MODULES = 8


def _edited_parts(result: WhatIf) -> Iterator[Table | Lines]:
    if result.search is not None:
        yield Lines([_describe_search(result)])
    if result.edited is None:
        return
    yield Lines(_evidence(result.edited))
    peak = result.edited
    if peak.by_category:
        place = f" at {peak.place}" if peak.place else ""
        yield Lines([f"The edited program's peak lies in {result.cases[1].phase or 'no phase'}{place}"])
        yield _table("category", peak.by_category, len(peak.by_category))
        yield _table("module", peak.by_module, _TOP_MODULES)


def _describe_search(result: WhatIf) -> str:
    size = format_bytes(result.capacity_bytes or 0)
    if result.edited is None:
        return f"It fits in {size} as it is."
    case = result.cases[-1]
    words = [f"--edit '{text}'" for text in case.edits]
    words += [f"--allocator {case.allocator}"] if case.allocator != result.cases[0].allocator else []
    options = " ".join(words) or "no change"
    if result.search:
        return f"The cheapest that fits in {size} (least time added, then fewest edits): {options}"
    if case.fits is None:
        return f"Nothing that was tried surely fits in {size}. The cheapest that perhaps does: {options}"
    return f"Nothing that was tried fits in {size}. The lowest reserved peak: {options}"


def _evidence(peak: EditedPeak) -> Iterator[str]:
    for edit in peak.edits:
        yield f"{edit.text}: {edit.rests_on}"
        for line in edit.unknown:
            yield f"  not known: {line}"


def _table(what: str, parts: Sequence[PartChange], top: int) -> Table:
    columns = [
        Column("name", what, TEXT, flexible=True),
        Column("before_bytes", "today's peak", BYTES),
        Column("after_bytes", "edited peak", BYTES),
        Column("change", "change", SIGNED_BYTES),
    ]
    changed = [part for part in parts if part.before_bytes != part.after_bytes]
    shown = parts if what == "category" else changed[:top]
    rows: list[Row] = [{**vars(part), "change": part.after_bytes - part.before_bytes} for part in shown]
    return Table(columns, rows)
