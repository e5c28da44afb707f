"""The harness of planted faults: its programs run, its marks are found, and its table judges as it says."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.forked_scripts import Forks

FOLDER = ROOT / "tests" / "programs" / "faults"
sys.path.insert(0, str(FOLDER))
import record_faults  # noqa: E402
from fault_table import judge, print_table  # noqa: E402
from record_faults import FAULTS, PLAIN, find_lines, find_truth, find_variants_of_tries  # noqa: E402


def test_every_fault_says_what_is_right_and_its_mark_is_in_its_program() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert sum(bool(fault.codes) for fault in FAULTS) >= 20
    for fault in FAULTS:
        assert (fault.marker is None) == (not find_lines(fault))
        assert not fault.codes or fault.faults or fault.without
        assert not fault.codes or fault.marker is not None or fault.module is not None


@pytest.mark.parametrize(
    "program", [pytest.param(one, marks=pytest.mark.slow) if one == "transformer" else one for one in PLAIN]
)
def test_every_variant_of_a_plain_program_runs_and_its_steps_are_timed(
    forks: Forks, tmp_path: Path, program: str
) -> None:
    variants = [list(fault.faults) for fault in FAULTS if fault.program == program]
    script = tmp_path / "measure.py"
    script.write_text(
        f"import json, sys\nsys.path.insert(0, {str(FOLDER)!r})\nfrom record_faults import measure_plain\n"
        f"print(json.dumps([measure_plain({program!r}, faults, tiny=True) for faults in {variants!r}]))\n"
    )
    done = forks.check([sys.executable, str(script)], tmp_path)
    times = json.loads(done.stdout.splitlines()[-1])
    assert [len(each) for each in times] == [2] * len(variants)
    assert all(min(each) > 0 for each in times)


@pytest.mark.slow
def test_a_job_of_several_ranks_measures_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_faults, "RANKS", 2)
    assert min(record_faults.measure_parallel(["late-python"], tiny=True)) > 0


def test_variants_are_measured_in_turns_and_one_that_fails_has_no_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "measure.py"
    program.write_text(
        f"import sys\nvariant = sys.argv[4]\nopen({str(tmp_path / 'turns')!r}, 'a').write(f'{{variant}};')\n"
        "print([1.5])\nsys.exit(variant == 'fault')\n"
    )
    monkeypatch.setattr(record_faults, "__file__", str(program))
    until = time.monotonic() + 600
    times = record_faults.measure_apart("plain", [(), ("fault",)], until, tiny=True)
    assert times == {"": [1.5, 1.5], "fault": []}
    assert (tmp_path / "turns").read_text() == ";fault;" * 2


def _row(**advice: Any) -> dict[str, Any]:
    after = {"low": 9e6, "expected": 10e6, "high": 11e6}
    one = {"code": "waits", "line": {"file": "/x/transformer.py", "line": 83}, "module": None, "after_ns": after}
    return {
        "fault": {"name": "f", "codes": ["waits"], "module": None, "fits": True},
        "lines": [["transformer.py", 80], ["transformer.py", 83]],
        "truth_ms": {"now": 12.0, "now_mean": 14.0, "after": 10.5, "after_mean": 10.6, "tries": {"compile": 11.5}},
        "summary": {"advice": [{"code": "compile", "after_ns": after}, {**one, **advice}]},
    }


@pytest.mark.parametrize(
    ("advice", "verdict"),
    [
        ({}, (True, True)),
        ({"line": {"file": "/x/transformer.py", "line": 84}}, (False, True)),
        ({"line": None}, (False, True)),
        ({"code": "python"}, (False, None)),
        ({"after_ns": {"low": 1e6, "expected": 2e6, "high": 3e6}}, (True, False)),
    ],
)
def test_a_fault_is_named_by_code_and_line_and_its_truth_lies_inside_or_not(
    advice: dict[str, Any], verdict: tuple[bool, bool | None], capsys: pytest.CaptureFixture[str]
) -> None:
    found = judge(_row(**advice))
    assert (found["named"], found["inside"]) == verdict
    assert found["others"][0]["code"] == "compile"
    print_table({"rows": [_row(**advice)]})
    said = capsys.readouterr().out
    assert "| 12.0 (mean 14.0) | 10.5 |" in said
    assert "compile 9.0 … 10.0 … 11.0 (true 11.5)" in said
    assert f"{int(verdict[0])} of 1 named" in said
    assert f"{int(bool(verdict[1]))} of {int(verdict[1] is not None)} inside" in said


def test_what_a_try_advises_is_measured_where_a_variant_makes_it() -> None:
    """The truth of a Try that is right without being the first change is that of what it advises."""
    row = _row()
    row["fault"] |= {"program": "hf_trainer", "faults": ["eager"], "without": [], "samples": 1, "codes": ["activation"]}
    row["summary"]["advice"] += [{"code": "activation", "line": None, "after_ns": None}]
    assert find_variants_of_tries(row) == {"compile": ("eager", "compiled"), "activation": ("eager", "torchs-gelu")}
    truths = {
        "hf_trainer": {"eager": [4.0, 6.0, 5.0], "": [3.0]},
        "hf_trainer, Tries": {"eager+torchs-gelu": [2.0]},
    }
    row["truth_ms"] = find_truth(row, truths)
    of_step = {"now": 5.0, "now_mean": 5.0, "after": 3.0, "after_mean": 3.0}
    assert row["truth_ms"] == of_step | {"tries": {"compile": None, "activation": 2.0}}
    assert judge(row)["true"] == 2.0
