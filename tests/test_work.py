"""The reader of work.json."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from profkit.analysis.efficiency.work import RangeWork, read_work
from profkit.errors import RunError

WORK: dict[str, Any] = {
    "version": 1,
    "source": "counted",
    "dtype": "bf16",
    "ranges": [
        {
            "path": ["forward", "layer 0"],
            "flops": 100,
            "other_flops": 7,
            "needed_flops": 60,
            "least_bytes": 400,
            "flops_by_dtype": {"bf16": 90, "fp32": 10},
            "instances": 2,
            "varies": True,
        }
    ],
    "model_flops": 300,
    "missing": ["aten::made_up"],
}


def _run(folder: Path, content: Any) -> Path:
    (folder / "work.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_every_field_comes_back(tmp_path: Path) -> None:
    work = read_work(_run(tmp_path, WORK))
    assert work is not None
    assert (work.source, work.dtype, work.model_flops, work.missing) == ("counted", "bf16", 300, ("aten::made_up",))
    assert work.find(("forward", "layer 0")) == RangeWork(
        ("forward", "layer 0"), 100, 7, 60, 400, {"bf16": 90, "fp32": 10}, 2, True
    )
    assert work.find(("forward",)) is None


def test_a_run_without_the_file_has_no_work(tmp_path: Path) -> None:
    assert read_work(tmp_path) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [("flops", -1), ("flops", 1.5), ("least_bytes", None), ("flops_by_dtype", []), ("other_flops", True)],
)
def test_a_number_that_is_no_count_is_named(tmp_path: Path, key: str, value: Any) -> None:
    content = copy.deepcopy(WORK)
    content["ranges"][0][key] = value
    with pytest.raises(RunError, match=r"work\.json: damaged .*record the run again"):
        read_work(_run(tmp_path, content))


@pytest.mark.parametrize("missing", ["source", "dtype", "ranges", "model_flops", "missing"])
def test_a_part_that_is_not_there_is_named(tmp_path: Path, missing: str) -> None:
    content = {key: value for key, value in WORK.items() if key != missing}
    with pytest.raises(RunError, match=f"damaged .*{missing}"):
        read_work(_run(tmp_path, content))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 2}', "[" * 100_000])
def test_another_version_or_form_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(RunError, match=r"work\.json: not"):
        read_work(_run(tmp_path, content))
