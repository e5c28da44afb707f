"""Prints the table of `record_faults.py`: what was planted, what was said, and what was true.

python tests/programs/faults/fault_table.py OUT/results.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path, PurePath
from typing import Any

_FAR = 0.05
"""A mean that is farther from the typical step than this share of it is printed beside it."""


def judge(row: dict[str, Any]) -> dict[str, Any]:
    """Return whether a fault was named, by which Try, and whether the true step after lies in its interval."""
    fault, tries = row["fault"], row["summary"].get("advice", [])
    right = [(number, one) for number, one in enumerate(tries, 1) if one["code"] in fault["codes"]]
    placed = [(number, one) for number, one in right if _has_place(one, row)]
    number, chosen = next(iter(placed or right), (None, None))
    after = None if chosen is None else chosen["after_ns"]
    truth = row["truth_ms"]["after"] if chosen is None else _true_after(chosen, row)
    return {
        "number": number,
        "named": chosen is not None and _has_place(chosen, row),
        "try": chosen,
        "inside": None if after is None or truth is None else after["low"] <= truth * 1e6 <= after["high"],
        "true": truth,
        "others": [one for one in tries if one is not chosen],
    }


def _has_place(advice: dict[str, Any], row: dict[str, Any]) -> bool:
    line, module = advice["line"], row["fault"]["module"]
    if line is not None and [PurePath(line["file"]).name, line["line"]] in [list(place) for place in row["lines"]]:
        return True
    return module is not None and module in (advice["module"] or "")


def _true_after(advice: dict[str, Any], row: dict[str, Any]) -> float | None:
    """Return the step after what a Try advises: as measured with that, else, for a right one, without the fault."""
    truth = row["truth_ms"]
    of_fault = truth["after"] if advice["code"] in row["fault"]["codes"] else None
    return truth.get("tries", {}).get(advice["code"], of_fault)


def _ms(time_ns: float | None) -> str:
    return "–" if time_ns is None else f"{time_ns / 1e6:.1f}"


def print_table(results: dict[str, Any]) -> None:
    """Print one row a fault, and the sums."""
    print("| planted | now | after | said: Try, place | predicted | named | inside | other Tries |")
    print("|---|---|---|---|---|---|---|---|")
    judged = [(row, judge(row)) for row in results["rows"]]
    for row, verdict in judged:
        advice, truth = verdict["try"], row["truth_ms"]
        after = None if advice is None else advice["after_ns"]
        place = "" if advice is None else f"{verdict['number']} {advice['code']} {_place(advice)}"
        reach = "–" if after is None else _reach(after)
        named, inside = (
            "–" if not row["fault"]["codes"] or one is None else "yes" if one else "no"
            for one in (verdict["named"], verdict["inside"])
        )
        now = _with_mean(truth["now"], truth["now_mean"])
        then = _with_mean(verdict["true"], truth["after_mean"] if verdict["true"] == truth["after"] else None)
        others = ", ".join(_describe_other(one, row) for one in verdict["others"])
        print(f"| {row['fault']['name']} | {now} | {then} | {place} | {reach} | {named} | {inside} | {others} |")
    for fits in (True, False):
        mine = [v for row, v in judged if row["fault"]["codes"] and row["fault"]["fits"] is fits]
        held = [verdict["inside"] for verdict in mine if verdict["inside"] is not None]
        print(
            f"\n{'looked at while the rows were written' if fits else 'kept as a test'}: "
            f"{sum(verdict['named'] for verdict in mine)} of {len(mine)} named, {sum(held)} of {len(held)} inside"
        )


def _with_mean(typical_ms: float | None, mean_ms: float | None) -> str:
    if typical_ms is None:
        return "–"
    differs = mean_ms is not None and abs(mean_ms - typical_ms) > _FAR * typical_ms
    return f"{typical_ms:.1f}" + (f" (mean {mean_ms:.1f})" if differs else "")


def _reach(after: dict[str, float]) -> str:
    return " … ".join(_ms(after[key]) for key in ("low", "expected", "high"))


def _describe_other(advice: dict[str, Any], row: dict[str, Any]) -> str:
    after, truth = advice["after_ns"], _true_after(advice, row)
    if after is None:
        return str(advice["code"])
    return f"{advice['code']} {_reach(after)}" + ("" if truth is None else f" (true {truth:.1f})")


def _place(advice: dict[str, Any]) -> str:
    line = advice["line"]
    return str(advice["module"] or "") if line is None else f"{PurePath(line['file']).name}:{line['line']}"


if __name__ == "__main__":
    print_table(json.loads(Path(sys.argv[1]).read_text()))
