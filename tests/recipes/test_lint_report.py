"""The command: findings in lines, exit code 3 where there is a mistake."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from click.testing import CliRunner

from profkit.errors import CaptureError
from recipes.lint_report import main
from tests.recipes.test_detectors import TABLES


def test_a_clean_table_exits_with_0() -> None:
    done = CliRunner().invoke(main, [str(TABLES / "model_warm.csv")], standalone_mode=False)
    assert done.return_value == 0
    assert done.stderr == "1 table, 0 mistakes, 1 note\n"


def test_a_mistake_exits_with_3_and_is_written_to_files(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, [str(TABLES / "model_cold.csv"), "-o", str(tmp_path)], standalone_mode=False)
    assert done.return_value == 3
    assert done.stdout.startswith("mistake: negative-time: model_cold.csv: back avg (sec) is -0.00274821")
    with (tmp_path / "lint_report.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["code"] for row in rows] == ["negative-time", "spread", "spread", "spread", "subtracted"]
    assert (tmp_path / "lint_report.md").read_text().startswith("| kind | code | table | message |")


@pytest.mark.parametrize(("name", "content"), [("a.csv", b"a,b\n"), ("a.md", b"words"), ("a.csv", b"\xff\xfe\x00")])
def test_a_file_without_a_table_is_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    done = CliRunner().invoke(main, [str(tmp_path / name)])
    assert isinstance(done.exception, CaptureError)
    assert "\n" not in str(done.exception)
