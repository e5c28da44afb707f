"""Each known mistake is found in a table that carries it, and nothing in the clean ones; the command prints them.

The figures in tables/ were published with five write-ups of the same experiments; headings are shortened.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from profkit.errors import CaptureError
from recipes.detectors import inspect_tables
from recipes.detectors.tables import BenchmarkTable, build_table, read_csv, read_markdown, read_tables
from recipes.detectors.times import differs_at_first
from recipes.lint_report import main
from tests.golden import check_text
from tests.in_process import csv_rows

TABLES = Path(__file__).parent / "tables"


CLEAN = {
    "attention_clean.csv",
    "model_bf16.csv",
    "model_bf16_compiled.csv",
    "model_cpu_mps.csv",
    "model_plus_minus.csv",
    "model_plus_minus_bf16.csv",
    "model_plus_minus_profiled.csv",
    "model_warm.csv",
}


def test_what_is_found_in_each_table() -> None:
    """In the clean ones nothing, also together; forward inside backward shows beside another table of its cells too."""
    each = sorted(path.name for path in TABLES.iterdir())
    said = []
    for names in [*([name] for name in each), sorted(CLEAN), ["attention_forward_inside.csv", "attention_clean.csv"]]:
        tables = [table for name in names for table in read_tables(TABLES / name)]
        found = inspect_tables(tables)
        assert all(one.is_note for one in found) == (set(names) <= CLEAN)
        said.append(f"{' '.join(names)}\n")
        said += [f"  {'note' if one.is_note else 'mistake'} {one.code}: {one.message}\n" for one in found]
    check_text("lint-report", "".join(said))


def test_a_compiled_row_is_not_taken_for_the_eager_one_of_its_cell() -> None:
    def table(name: str, backward: float) -> BenchmarkTable:
        rows = [{"d_model": 16, "length": n, "mode": mode, "forward_ms": 10.0, "backward_ms": ms}
                for n in (256, 512, 1024) for mode, ms in (("eager", 20.0), ("compiled", backward))]  # fmt: skip
        return build_table(name, rows)

    found = inspect_tables([table("a", 29.0), table("b", 20.0)])
    assert "forward-in-backward" not in {each.code for each in found}


def test_rows_without_a_value_are_not_counted() -> None:
    rows = [{"n": n, "forward_mean_ms": 2.0 + n if n < 3 else None, "forward_std_ms": 1.5 if n < 3 else None,
             "peak_MiB": -1.5 if n == 0 else 2.5 if n < 3 else None} for n in range(10)]  # fmt: skip
    said = [found.message for found in inspect_tables([build_table("t", rows)])]
    assert any("30% of the mean in 3 of 3 rows" in each for each in said), said
    assert any("peak_MiB is negative in 1 of 3 rows" in each for each in said), said


@pytest.mark.parametrize("nothing", ["", "—", "-", "n/a", "not run"])
def test_a_dash_is_no_value(nothing: str) -> None:
    """Markdown has a dash where CSV has an empty cell; what was measured in few rows is still a time."""
    lines = ["| size | batch | dtype | forward (ms) | mfu | status |", "|---|---|---|---|---|---|"]
    lines += [f"| small | {nothing} | {dtype} | {ms} | 0.{ms} | ok |" for dtype, ms in (("fp32", 10), ("bf16", 12))]
    lines += [f"| {size} | 4 | bf16 | {nothing} | {nothing} | {nothing} |" for size in ("medium", "large", "xl")]
    (table,) = read_markdown("\n".join(lines), "t.md")
    assert table.roles["mfu"].quantity == "number"
    assert table.seconds("forward") == [0.01, 0.012, None, None, None]
    assert table.describe(1) == "size small, dtype bf16"


def test_mib_labelled_mb_is_found() -> None:
    text = (TABLES / "attention_clean.csv").read_text().replace("MiB", "MB")
    codes = [found.code for found in inspect_tables([read_csv(text, "t.csv")[0]]) if not found.is_note]
    assert codes == ["unit-label", "unit-label"]


_SIZES = (256, 512, 1024)
_ALIKE = {
    "true megabytes": [{"seq_len": 100 * n, "peak_MB": f"{2.0 * 1.37**n + n / 7:.2f}"} for n in range(1, 40)],
    "two units that convert": [{"peak_MiB": 1024.0 * n, "peak_GiB": 1.0 * n} for n in (1, 2, 3)],
    "columns of nothing": [{"compiled_graphs": n, "allocator_retries": n} for n in (0, 0, 0, None)],
    "axes in their places": [
        {"d_model": d, "seq_len": s, "peak_MiB": 64 * s * s / 2**20 + d * s / 2**15}
        for d in (16, 32, 64)
        for s in _SIZES
    ],
    "a deviation of its mean": [
        {"forward_ms": 1.5, "forward_mean_ms": 100.0 + n, "forward_std_ms": 5.0} for n in range(3)
    ],
    "no number in a cell": [{"seq_len": 256, "forward_ms": 1.5, "backward_ms": None, "status": "OOM(backward)"}] * 3,
    "a computed column": [
        {"seq_len": s, "d_model": 16, "saved_MiB": 64 * s * s / 2**20, "bytes_per_seq2": 64.0, "growth": s / 7}
        for s in _SIZES
    ],
}


@pytest.mark.parametrize("name", _ALIKE)
def test_what_looks_like_a_mistake_and_is_none_is_not_reported(name: str) -> None:
    assert [found for found in inspect_tables([build_table("t", _ALIKE[name])]) if not found.is_note] == []


def test_a_computed_column_is_no_label() -> None:
    assert build_table("t", _ALIKE["a computed column"]).describe(1) == "seq_len 512"


@pytest.mark.parametrize(
    ("rows", "code", "message"),
    [
        (
            [{"peak_MiB": 1024.0 * n, "peak_GiB": 1.024 * n} for n in (1, 2, 3)],
            "unit-conversion",
            "peak_MiB 1024 is 1 in gib, and peak_GiB says 1.024 (row 1)",
        ),
        (
            [{"forward_ms": n, "step_ms": n} for n in (1.5, 2.5, 3.5, None)],
            "identical-columns",
            "forward_ms and step_ms are identical in all 3 rows",
        ),
        ([{"forward_ms": 0.5, "backward_ms": 5.0 + n} for n in range(3)], "launch-bound", "3 of 3"),
    ],
)
def test_a_mistake_in_made_rows_is_the_only_one(rows: list[dict[str, float]], code: str, message: str) -> None:
    (found,) = inspect_tables([build_table("t", rows)])
    assert (found.code, found.is_note) == (code, code == "launch-bound")
    assert message in found.message


def test_a_first_sample_far_from_the_others_is_an_outlier() -> None:
    assert differs_at_first([80.0, 10.0, 10.1, 9.9, 10.0])
    assert not differs_at_first([10.4, 10.0, 10.1, 9.9, 10.0])
    assert not differs_at_first([80.0, 10.0])


def test_markdown_with_text_between_tables_is_read() -> None:
    text = "# Times\n\n| size | forward (ms) |\n|:--|--:|\n| a\\|b | **1.50** |\n| c | OOM |\n\nText | no table\n"
    (table,) = read_markdown(text, "t.md")
    assert table.values("forward (ms)") == [1.5, None]
    assert table.rows[0]["size"] == "a|b"


_HEADINGS = (
    "d_model",
    "seq_len",
    "forward_ms",
    "backward (s)",
    "memory (MB)",
    "memory/seq^2",
    "peak_MiB",
    "share",
    "size",
    "parameters",
    "batch",
    "passes",
    "dtype",
    "status",
    "x",
)
_CELLS = st.one_of(
    st.floats(allow_nan=False).map(repr),
    st.sampled_from(["", "0", "-1", "1e308", "2 ± 3", "4 GB", "OOM", "—", "bf16", "fp32", "forward-backward", "train"]),
)
_TEXTS = st.text(alphabet="xs=()MB+-*/^0123456789.| \n", max_size=60)


@given(st.lists(st.fixed_dictionaries(dict.fromkeys(_HEADINGS, _CELLS)), max_size=5))
def test_no_table_breaks_the_detectors(rows: list[dict[str, str]]) -> None:
    table = BenchmarkTable("t", _HEADINGS, tuple(rows))
    for found in inspect_tables([table, table]):
        assert found.message.strip()


@given(_TEXTS)
def test_no_text_breaks_the_reader(text: str) -> None:
    for table in [*read_markdown(text, "t"), *read_csv(text, "t")]:
        assert all(set(row) == set(table.headings) for row in table.rows)


# -- the command ---------------------------------------------------------------------------------------------------


def test_a_clean_table_exits_with_0() -> None:
    done = CliRunner().invoke(main, [str(TABLES / "model_warm.csv")], standalone_mode=False)
    assert done.return_value == 0
    assert done.stderr == "1 table, 0 mistakes, 1 note\n"


def test_a_mistake_exits_with_3_and_is_written_to_files(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, [str(TABLES / "model_cold.csv"), "-o", str(tmp_path)], standalone_mode=False)
    assert done.return_value == 3
    assert done.stdout.startswith("mistake: negative-time: model_cold.csv: back avg (sec) is -0.00274821")
    assert [row["code"] for row in csv_rows(tmp_path / "lint_report.csv")] == [
        "negative-time",
        "spread",
        "spread",
        "spread",
        "subtracted",
    ]
    assert (tmp_path / "lint_report.md").read_text().startswith("| kind | code | table | message |")


@pytest.mark.parametrize(("name", "content"), [("a.csv", b"a,b\n"), ("a.md", b"words"), ("a.csv", b"\xff\xfe\x00")])
def test_a_file_without_a_table_is_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    done = CliRunner().invoke(main, [str(tmp_path / name)])
    assert isinstance(done.exception, CaptureError)
    assert "\n" not in str(done.exception)
