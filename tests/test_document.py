"""A document, rendered five ways: exact values in JSON and CSV, the same cells for people, findings everywhere."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from profkit.findings import Finding
from profkit.report.document import (
    FORMATS,
    SCHEMA,
    UNKNOWN,
    UNTRUSTED,
    Column,
    Document,
    Format,
    Lines,
    Table,
    render,
    render_table,
)
from profkit.report.units import NS, SHARE, TEXT
from profkit.version import __version__

COLUMNS = (Column("time_ns", "time", NS), Column("share", "share", SHARE), Column("name", "name", TEXT, flexible=True))


def make_document(name: str = "gemm", **options: object) -> Document:
    table = Table(COLUMNS, [{"time_ns": 1500, "share": 0.25, "name": name}, {"time_ns": 7, "share": None, "name": "b"}])
    parts = (Lines(["what it is"], "head"), table, Lines(["how it adds up"]))
    return Document("kernels", {"trace": "t.sqlite", "rows": 2}, parts, table, **options)  # type: ignore[arg-type]


def test_json_starts_with_its_schema_the_version_and_the_command() -> None:
    data = json.loads(render(make_document(), "json"))
    assert list(data.items())[:3] == [("schema", SCHEMA), ("profkit", __version__), ("command", "kernels")]
    assert (data["rows"], data["warnings"]) == (2, [])
    assert "self_check" not in data


def test_csv_holds_exact_values_and_nothing_for_an_unknown_one() -> None:
    rows = list(csv.DictReader(io.StringIO(render(make_document(), "csv"))))
    assert rows == [{"time_ns": "1500", "share": "0.25", "name": "gemm"}, {"time_ns": "7", "share": "", "name": "b"}]


def test_tables_for_people_hold_the_same_cells() -> None:
    screen = render(make_document(), "table").splitlines()
    assert screen[4:6] == ["1.500 µs  25.0%  gemm", f"    7 ns      {UNKNOWN}  b"]
    assert "| 1.500 µs | 25.0% | gemm |" in render(make_document(), "markdown")
    assert r"1.500 µs & 25.0\% & gemm \\" in render(make_document(), "latex")


@pytest.mark.parametrize("style", [style for style in FORMATS if style != "csv"])
def test_every_format_with_sentences_holds_failures_and_warnings(style: Format) -> None:
    check = [Finding("lost", "9 kernels lost", "failed"), Finding("usual", "says nothing", "note")]
    text = render(make_document(findings=[Finding("odd", "odd times")], self_check=check), style)
    assert "odd times" in text
    assert "9 kernels lost" in text
    assert ("says nothing" in text) == (style == "json")
    assert (UNTRUSTED in text) == (style != "json")


def test_json_marks_a_failed_self_check() -> None:
    check = [Finding("lost", "9 kernels lost", "failed"), Finding("usual", "says nothing", "note")]
    data = json.loads(render(make_document(self_check=check), "json"))
    assert [(one["code"], one["verdict"]) for one in data["warnings"]] == [("self-check-lost", "failed")]
    assert (data["self_check"]["passed"], len(data["self_check"]["findings"])) == (False, 2)


def test_a_warning_is_shown_once() -> None:
    same = [Finding("a", "odd times"), Finding("b", "odd times")]
    assert len(make_document(findings=same).warnings) == 1


def test_a_path_in_json_is_absolute_only_with_full_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = Document("kernels", {"trace": str(tmp_path / "runs" / "t.sqlite")}, (), Table((), []))
    assert json.loads(render(document, "json"))["trace"] == "t.sqlite"
    assert json.loads(render(document, "json", full_names=True))["trace"] == str(tmp_path / "runs" / "t.sqlite")
    monkeypatch.chdir(tmp_path)
    assert json.loads(render(document, "json"))["trace"] == "runs/t.sqlite"


def test_a_table_fits_its_width_unless_full_names_are_asked_for() -> None:
    table = Table(COLUMNS, [{"time_ns": 1, "share": 1.0, "name": "k" * 200}])
    assert max(map(len, render_table(table, width=80).splitlines())) == 80
    assert "k" * 200 in render_table(table, full_names=True)
    columns = [Column(str(at), "name", TEXT, flexible=True) for at in range(5)]
    many = Table(columns, [{str(at): f"{at}" * 20 for at in range(5)}])
    assert max(map(len, render_table(many, width=80).splitlines())) == 80
    assert len(render_table(Table(COLUMNS, [])).splitlines()) == 2


def test_the_lines_that_are_not_shown_stand_in_one_more_row_without_what_cannot_be_added() -> None:
    table = Table(COLUMNS, [], rest={"time_ns": 10, "name": "(3 more)"})
    assert render_table(table).splitlines()[-1] == "10 ns         (3 more)"


def test_a_wide_column_is_left_out_on_a_screen_only() -> None:
    table = Table((*COLUMNS, Column("domain", "domain", TEXT, wide=True)), [{"domain": "NCCL"}])
    assert "domain" not in render_table(table)
    assert "| NCCL |" in render(Document("ranges", {}, [table], table), "markdown")


@pytest.mark.parametrize(
    "character", ["\x00", "\x1b", "\x07", "\r", "\n", "\x7f", "\x9b", "\u2028", "\u202e", "\udcff"]
)
@pytest.mark.parametrize("style", ["table", "markdown", "latex"])
def test_no_control_character_of_a_name_is_printed(character: str, style: Format) -> None:
    text = render(make_document(f"a{character}b"), style)
    # A break of any kind would add a line.
    assert len(text.splitlines()) == len(render(make_document("ab"), style).splitlines())
    assert character == "\n" or character not in text
    text.encode()


def test_a_row_of_latex_begins_no_argument() -> None:
    table = Table((Column("name", "name", TEXT),), [{"name": "a"}, {"name": "[b]"}])
    text = render(Document("kernels", {}, [table], table), "latex")
    assert not any(line.startswith("[") for line in text.splitlines())
