"""The documents of `profkit whatif` and `profkit try`: what edits of a program are predicted, and measured, to do.

Of a prediction: the peaks of each case, whether they fit, what an edited peak is made of, and the step. Of trials: the
step with each edit, its interval, peak and losses, and the code of the best.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import PurePath

from profkit.analysis.step_replay.predict import Prediction
from profkit.analysis.trials import LossChange, Trial, find_best, known_edits
from profkit.analysis.whatif.answers import Case, WhatIf
from profkit.analysis.whatif.apply import EditedPeak, PartChange
from profkit.errors import Finding
from profkit.report.commands.steps import time_parts, time_table
from profkit.report.document import Column, Document, Lines, Row, Table
from profkit.report.units import (
    BYTES,
    NS,
    PLAIN,
    SIGNED_BYTES,
    SIGNED_NS,
    TEXT,
    Unit,
    format_bytes,
    format_change,
    format_count,
    format_exactly,
    format_interval,
    format_ns,
    format_share,
)
from profkit.run.edits import Edit, TrialPlan, parse_edits

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
        Table(columns, [_case_row(result, case) for case in shown]),
        *_edited_parts(result),
        Lines(_case_notes(result, hidden)),
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
    exact = Table((), [_case_row(result, case) for case in result.cases], exact=_EXACT)
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


def _case_row(result: WhatIf, case: Case) -> Row:
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


def _case_notes(result: WhatIf, hidden: list[Case]) -> Iterator[str]:
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
    yield Lines(_edit_evidence(result.edited))
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


def _edit_evidence(peak: EditedPeak) -> Iterator[str]:
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


_AS_IS = "now"
_SLOW_FIRST_NS = 1e9
"""Only a longer start than the unchanged program's is worth a word."""

_TRIAL_COLUMNS = (
    Column("name", "program", TEXT, flexible=True),
    Column("step_ns", "step", Unit(lambda value: format_ns(round(value)))),
    Column("change_ns", "change", Unit(lambda value: SIGNED_NS.show(round(value)))),
    Column("interval", "95 % interval", TEXT),
    Column("allocated_peak_bytes", "peak", BYTES),
    Column("loss", "loss", TEXT),
)
_TRIAL_EXACT = (
    "name",
    "processes",
    "step_ns",
    "error_ns",
    "change_ns",
    "change_low_ns",
    "change_high_ns",
    "allocated_peak_bytes",
    "loss_share",
    "reason",
)


def build_trials_document(run: str, plan: TrialPlan, trials: Sequence[Trial], *, with_source: bool = False) -> Document:
    """Return the table of one call of `profkit try`, what proves each edit, and the code of the best.

    ``with_source``: lines of the program's source that it changes are read and shown.
    """
    rows = [_trial_row(trial, name) for trial, name in zip(trials, _name_rows(trials), strict=True)]
    best = find_best(trials)
    # Where there is no GPU, or no loss was seen, the table has no such column.
    empty = {key for key in ("allocated_peak_bytes", "loss") if not any(row.get(key) for row in rows)}
    parts: list[Table | Lines] = [
        Table([column for column in _TRIAL_COLUMNS if column.key not in empty], rows),
        Lines(_trial_notes(plan, trials)),
        Lines(_trial_evidence(trials), title="Edits"),
        Lines(_to_make(best, trials[0], with_source=with_source)),
    ]
    data = {
        "run": run,
        "warmup_steps": plan.warmup_steps,
        "steps": plan.steps,
        "trials": [trial.to_dict() for trial in trials],
        "best": None if best is None else list(best.edits),
    }
    return Document("try", data, parts, Table((), rows, exact=_TRIAL_EXACT))


def _name_rows(trials: Sequence[Trial]) -> Iterator[str]:
    """Yield what the table calls each trial: where edits were tried together too they have numbers, as in ``1 + 3``."""
    alone = [trial.edits[0] for trial in trials if len(trial.edits) == 1]
    numbers = {edit: str(number) for number, edit in enumerate(alone, 1)}
    has_several = any(len(trial.edits) > 1 and numbers.keys() >= set(trial.edits) for trial in trials)
    for trial in trials:
        if not has_several or not numbers.keys() >= set(trial.edits):
            yield name_trial(trial)
        elif len(trial.edits) == 1:
            yield f"{numbers[trial.edits[0]]} {trial.edits[0]}"
        else:
            yield " + ".join(number for edit, number in numbers.items() if edit in trial.edits) or _AS_IS


def _trial_row(trial: Trial, name: str) -> Row:
    loss = trial.loss
    words = {"name": name, "interval": _interval(trial), "loss": None if loss is None else _describe_loss(loss)}
    return {**vars(trial), **words, "loss_share": None if loss is None else loss.share}


def _interval(trial: Trial) -> str | None:
    if trial.change_low_ns is not None and trial.change_high_ns is not None:
        return format_interval(round(trial.change_low_ns), round(trial.change_high_ns))
    if trial.error_ns is not None and not trial.edits:
        return f"± {format_ns(round(trial.error_ns))}"
    return None


def _describe_loss(loss: LossChange) -> str:
    if not loss.is_comparable:
        return "not comparable"
    if loss.departs:
        return f"DEPARTS by {format_share(loss.share)}"
    if not loss.share:
        return "equal"
    return f"equal to {format_count(loss.digits, 'digit')}" if loss.digits > 1 else f"± {format_share(loss.share)}"


def name_trial(trial: Trial) -> str:
    return " + ".join(trial.edits) or _AS_IS


def describe_trial(trial: Trial) -> str:
    """Return what a trial measured, in a clause: ``measured −0.93 ms (−1.01 … −0.85 ms)``."""
    if trial.change_ns is None:
        return f"tried: {(trial.reason or 'nothing was measured').removeprefix(f'{name_trial(trial)}: ')}"
    interval = f" ({_interval(trial)})" if trial.change_low_ns is not None else ""
    return f"measured {SIGNED_NS.show(round(trial.change_ns))} a step{interval}"


def _trial_notes(plan: TrialPlan, trials: Sequence[Trial]) -> Iterator[str]:
    counts = sorted({trial.processes for trial in trials if trial.edits and trial.processes})
    how = f"{plan.steps} steps each after {plan.warmup_steps}"
    if counts[-1:] == [1]:
        yield f"One process of each, {how}: there is no interval"
    elif counts:
        often = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
        yield f"Means of {often} processes, {how}; a change is to the process without edits in the same turn"
    if any(trial.loss is not None for trial in trials):
        steps = max(trial.loss.steps for trial in trials if trial.loss is not None)
        yield f"loss: the largest difference in the first {steps} steps, as a share of the loss"
    if any(trial.loss is not None and not trial.loss.is_comparable for trial in trials):
        yield "not comparable: the program's own losses differ between processes, or the edit trains on other batches"


def _trial_evidence(trials: Sequence[Trial]) -> Iterator[str]:
    for trial in trials:
        name = name_trial(trial)
        for evidence in trial.evidence if len(trial.edits) == 1 and not trial.reason else ():
            place = "" if evidence.place is None else f" [{_short_place(evidence.place)}]"
            yield f"{evidence.edit}: {evidence.text}{place}"
        if trial.reason is not None:
            reason = trial.reason.removeprefix(f"{name}: ")
            yield f"{name}: {'' if trial.processes else 'NOT MEASURED: '}{reason}{_what_it_needs(trial)}"
        if trial.first_ns is not None and trial.first_ns > _SLOW_FIRST_NS:
            yield f"{name}: the first steps take {format_ns(round(trial.first_ns))} longer (compiling, trying out)"
        if trial.batch_factor != 1 and trial.step_ns and trial.change_ns is not None:
            rate = trial.batch_factor * (trial.step_ns - trial.change_ns) / trial.step_ns - 1
            yield f"{name}: {format_change(rate, 1)} samples a second"
        if trial.is_as_predicted is not None:
            yield f"{name}: {_prediction(trial)}"


def _what_it_needs(trial: Trial) -> str:
    refused = known_edits(evidence.edit for evidence in trial.evidence if not evidence.is_made)
    needs = [edit.spec.trying_needs for edit in refused if edit.spec.trying_needs]
    return f" (it needs {'; '.join(needs)})" if needs else ""


def _prediction(trial: Trial) -> str:
    prediction = trial.prediction
    assert prediction is not None
    assert prediction.low_ns is not None
    assert prediction.now_ns is not None
    low_ns = prediction.low_ns - prediction.now_ns
    if prediction.high_ns is None:
        said = f"at best {SIGNED_NS.show(low_ns)}"
    else:
        said = format_interval(low_ns, prediction.high_ns - prediction.now_ns)
    if trial.is_as_predicted:
        return f"predicted {said}: held"
    return (
        f"predicted {said}: DID NOT HOLD{' by the mean; more --processes decide' if trial.may_be_as_predicted else ''}"
    )


def _short_place(place: str) -> str:
    file, number = _split_place(place)
    return f"{PurePath(file).name}:{number}"


def _split_place(place: str) -> tuple[str, int]:
    """Return the file and the line of ``/a/train.py:7 main``; line 0, which no file has, where it says none."""
    file, _, line = place.rpartition(":")
    number = line.partition(" ")[0]
    return (file, int(number)) if number.isdecimal() else (place, 0)


def _to_make(best: Trial | None, as_is: Trial, *, with_source: bool) -> Iterator[str]:
    if best is None or as_is.step_ns is None or best.change_ns is None:
        yield "No edit makes the step shorter for certain; more --processes make the intervals narrower."
        return
    share = format_change(best.change_ns / as_is.step_ns, 1)
    yield f"Best: {name_trial(best)}, {SIGNED_NS.show(round(best.change_ns))} a step ({share}). To make it:"
    for edit in known_edits(best.edits):
        place = next((each.place for each in best.evidence if each.edit == edit.text), None)
        yield from (f"    {line}" for line in _describe_change(edit, place, with_source=with_source))


def _describe_change(edit: Edit, place: str | None, *, with_source: bool) -> Iterator[str]:
    changed = write_change(place, edit) if place is not None and with_source else None
    if place is None:
        yield write_code(edit.text)
    elif changed is None:
        yield f"{write_code(edit.text)}    # now {_short_place(place)}"
    else:
        before, after = changed
        yield f"{_short_place(place)}:"
        yield f"- {before}"
        yield f"+ {after}"


def write_change(place: str, edit: Edit) -> tuple[str, str] | None:
    """Return the line at a place and what it would be with an edit; None where the edit is no keyword of its one call.

    The file is read as it is now.
    """
    file, number = _split_place(place)
    line = linecache.getline(file, number).strip()
    keywords = edit.spec.keywords.replace("{}", edit.argument)
    try:
        (statement,) = ast.parse(line).body
    except (SyntaxError, ValueError):
        return None
    call = getattr(statement, "value", None)
    if not keywords or not isinstance(call, ast.Call) or not line.endswith(")"):
        return None
    names = {keyword.partition("=")[0] for keyword in keywords.split(", ")}
    given = [*call.args, *(keyword for keyword in call.keywords if keyword.arg not in names)]
    kept = [ast.get_source_segment(line, node) for node in given]
    start = ast.get_source_segment(line, call.func) or ""
    head = line[: line.index(start)] + start
    return line, f"{head}({', '.join([*filter(None, kept), keywords])})"


def write_code(text: str) -> str:
    (edit,) = parse_edits([text])
    quoted = f', mode="{edit.argument}"' if edit.spec.name == "compile" and edit.argument else edit.argument
    return edit.spec.code.replace("{}", quoted)


def build_held_document(trials: Sequence[tuple[str, Trial]]) -> Document:
    """Return how often predictions held, over the trials of several runs, each with its run's name."""
    judged = [(run, trial) for run, trial in trials if trial.is_as_predicted is not None]
    rows: list[Row] = [
        {
            "run": run,
            "edits": name_trial(trial),
            "low_ns": trial.prediction.low_ns,
            "high_ns": trial.prediction.high_ns,
            "after_ns": round((trial.prediction.now_ns or 0) + (trial.change_ns or 0)),
            "held": "yes" if trial.is_as_predicted else "no",
        }
        for run, trial in judged
        if trial.prediction is not None
    ]
    columns = (
        Column("run", "run", TEXT, flexible=True),
        Column("edits", "edits", TEXT, flexible=True),
        Column("low_ns", "least", NS),
        Column("high_ns", "most", NS),
        Column("after_ns", "measured", NS),
        Column("held", "held", TEXT),
    )
    held = sum(bool(trial.is_as_predicted) for _, trial in judged)
    said = f"{held} of {format_count(len(judged), 'prediction')} held; {len(trials) - len(judged)} trials had none"
    table = Table(columns, rows, exact=tuple(column.key for column in columns))
    return Document(
        "try", {"held": held, "predicted": len(judged), "rows": rows}, [Lines([said], "head"), table], table
    )
