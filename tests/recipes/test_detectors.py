"""Each known mistake is found in a table that carries it, and nothing in the clean ones.

The figures in tables/ were published with five write-ups of the same experiments; headings are shortened.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.detectors.inspect import inspect_tables
from recipes.detectors.tables import BenchmarkTable, build_table, read_csv, read_markdown, read_tables
from recipes.detectors.times import differs_at_first

TABLES = Path(__file__).parent / "tables"


def _mistakes(*names: str) -> list[tuple[str, str]]:
    tables = [table for name in names for table in read_tables(TABLES / name)]
    return [(found.code, found.message) for found in inspect_tables(tables) if not found.is_note]


def _notes(*names: str) -> list[str]:
    tables = [table for name in names for table in read_tables(TABLES / name)]
    return [found.message for found in inspect_tables(tables) if found.code == "bf16-slower"]


CLEAN = (
    "attention_clean.csv",
    "model_bf16.csv",
    "model_bf16_compiled.csv",
    "model_cpu_mps.csv",
    "model_plus_minus.csv",
    "model_plus_minus_bf16.csv",
    "model_plus_minus_profiled.csv",
    "model_warm.csv",
)


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_table_raises_no_alarm(name: str) -> None:
    assert _mistakes(name) == []


def test_the_clean_tables_together_raise_none() -> None:
    assert _mistakes(*CLEAN) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model_cold.csv", {"negative-time", "spread"}),
        ("model_one_warmup_step.csv", {"spread"}),
        ("model_compiled.csv", {"spread"}),
        ("attention_forward_inside.csv", {"backward-ratio"}),
        ("attention_linear.md", {"exponent-claim", "carried-over"}),
        ("attention_mps.csv", {"zero-memory", "spread"}),
        ("attention_mps_compiled.csv", {"zero-memory", "spread", "backward-ratio"}),
        ("attention_cuda.csv", {"swapped-axes", "carried-over", "negative-memory"}),
        ("attention_cuda_compiled.csv", {"swapped-axes", "carried-over", "negative-memory"}),
        ("attention_cuda_bf16.csv", {"swapped-axes", "carried-over", "negative-memory", "spread"}),
        ("attention_plus_minus.csv", {"spread", "carried-over", "unit-label"}),
        ("memory_per_square.csv", {"unit-factor", "unit-label", "carried-over"}),
        ("formula.md", {"formula-examples"}),
        ("shares.md", {"borrowed-shares"}),
    ],
)
def test_a_table_with_mistakes_shows_these_and_no_others(name: str, expected: set[str]) -> None:
    assert {code for code, _ in _mistakes(name)} == expected


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "model_cold.csv",
            "back avg (sec) is -0.00274821 at model S: no time is negative; it is forward+backward less",
        ),
        ("model_cold.csv", "and forward spreads by 224%: it held the first pass"),
        ("attention_plus_minus.csv", "0.37 ± 0.71 at d_model 16, seq_len 256"),
        ("attention_forward_inside.csv", "backward takes 3.07 times as long as forward (median of 24 rows"),
        (
            "memory_per_square.csv",
            "computed with 1,000,000 bytes where one of memory (MB) is 1,048,576: 30.697323 should",
        ),
        ("memory_per_square.csv", "should be 32.1885 (d_model 16, seq_len 16384)"),
        ("attention_mps.csv", "model mem, model+fwd mem, model+fwd+back mem, fwd mem, back mem: 0 in every row"),
        ("formula.md", "Forward Pass disagrees with its formula in 3 of 4 rows: 3.8 GB for 3.5 (S 128)"),
        ("formula.md", "73.7 GB for 55.8 (S 1024)"),
        ("attention_linear.md", "memory (GB) grows with seq_len to the power of 1.97"),
        ("attention_cuda.csv", "model mem begins with 1.125 at context_length 16, d_model 256, then follows a line on"),
        ("attention_cuda.csv", "which 17.38 would be due there: about 16.25 of the first cell is left"),
        (
            "attention_cuda.csv",
            "model mem grows with d_model to the power of 1.97, with context_length to the power of 0.04",
        ),
        ("shares.md", "4 of 4 shares of forward are those of shares.md, table 1, forward and backward"),
    ],
)
def test_a_mistake_is_named_with_its_figures(name: str, said: str) -> None:
    assert any(said in message for _, message in _mistakes(name))


def test_forward_inside_backward_shows_beside_another_table_of_the_same_cells() -> None:
    found = [message for code, message in _mistakes("attention_forward_inside.csv", "attention_clean.csv")
             if code == "forward-in-backward"]  # fmt: skip
    assert found == [
        "backward over forward is 3.36 at width 128 and length 16384, where attention_clean.csv has 2.09 "
        "(1.19 more, median of 12 cells): forward was timed inside backward"
    ]


def test_slower_in_bf16_is_noted() -> None:
    notes = _notes("model_warm.csv", "model_bf16.csv")
    assert len(notes) == 4  # the largest size is faster
    assert notes[0].startswith("forward is slower in bf16, 11.55 ms against 10.12 ms at model S")


def test_sizes_in_words_tell_rows_apart_though_one_looks_like_a_number() -> None:
    sizes = ("small", "medium", "large", "2.7B")
    wide = [{"size": size, "dtype": "fp32", "forward (s)": 0.1} for size in sizes]
    narrow = [{"size": size, "dtype": "bf16", "forward (s)": 0.15 if size == "small" else 0.05} for size in sizes]
    notes = [found.message for found in inspect_tables([build_table("t", wide + narrow)])]
    assert len(notes) == 1
    assert "150 ms against 100 ms at size small: " in notes[0]


def test_slower_in_bf16_is_launch_bound_where_half_the_work_takes_as_long() -> None:
    wide = [{"context": size, "dtype": "fp32", "forward (s)": 0.1} for size in (128, 256)]
    narrow = [{"context": size, "dtype": "bf16", "forward (s)": 0.15} for size in (128, 256)]
    notes = [found.message for found in inspect_tables([build_table("t", wide + narrow)])]
    assert [note.rpartition(": ")[2] for note in notes] == ["another size takes as long"] * 2
    assert all("launch-bound" in note for note in notes)


def test_mb_is_told_from_mib() -> None:
    text = (TABLES / "attention_clean.csv").read_text().replace("MiB", "MB")
    codes = [found.code for found in inspect_tables([read_csv(text, "t.csv")[0]]) if not found.is_note]
    assert codes == ["unit-label", "unit-label"]


def test_true_megabytes_are_not_mistaken_for_mib() -> None:
    rows = [{"seq_len": 100 * n, "peak_MB": f"{2.0 * 1.37**n + n / 7:.2f}"} for n in range(1, 40)]
    assert inspect_tables([build_table("t", rows)]) == []


def test_two_units_of_one_thing_must_convert() -> None:
    right = [{"peak_MiB": 1024.0 * n, "peak_GiB": 1.0 * n} for n in (1, 2, 3)]
    wrong = [{"peak_MiB": 1024.0 * n, "peak_GiB": 1.024 * n} for n in (1, 2, 3)]
    assert inspect_tables([build_table("t", right)]) == []
    (found,) = inspect_tables([build_table("t", wrong)])
    assert (found.code, found.message) == (
        "unit-conversion", "peak_MiB 1024 is 1 in gib, and peak_GiB says 1.024 (row 1)"
    )  # fmt: skip


def test_identical_columns() -> None:
    rows = [{"forward_ms": n, "backward_ms": n} for n in (1.5, 2.5, 3.5)]
    assert "identical-columns" in {found.code for found in inspect_tables([build_table("t", rows)])}


def test_launch_bound_rows_are_never_judged() -> None:
    rows = [{"forward_ms": 0.5, "backward_ms": 5.0 + n} for n in range(3)]
    (note,) = inspect_tables([build_table("t", rows)])
    assert (note.code, note.is_note) == ("launch-bound", True)


def test_attention_with_its_axes_right_is_left_alone() -> None:
    rows = [{"d_model": d, "seq_len": s, "peak_MiB": 64 * s * s / 2**20 + d * s / 2**15}
            for d in (16, 32, 64) for s in (256, 512, 1024)]  # fmt: skip
    assert inspect_tables([build_table("t", rows)]) == []


def test_a_claim_that_holds_is_left_alone() -> None:
    table = read_tables(TABLES / "attention_linear.md")[0]
    for text in ("Memory grows quadratically with the sequence length.", "Memory is not linear in sequence length."):
        other = BenchmarkTable(table.name, table.headings, table.rows, text=text)
        assert "exponent-claim" not in {found.code for found in inspect_tables([other])}


def test_the_first_sample() -> None:
    assert differs_at_first([80.0, 10.0, 10.1, 9.9, 10.0])
    assert not differs_at_first([10.4, 10.0, 10.1, 9.9, 10.0])
    assert not differs_at_first([80.0, 10.0])


def test_what_is_not_measured_is_no_number() -> None:
    rows = [{"seq_len": 256, "forward_ms": 1.5, "backward_ms": None, "status": "OOM(backward)"}] * 3
    assert inspect_tables([build_table("t", rows)]) == []


def test_markdown_with_words_between_its_cells() -> None:
    text = "# Times\n\n| size | forward (ms) |\n|:--|--:|\n| a\\|b | **1.50** |\n| c | OOM |\n\nText | no table\n"
    (table,) = read_markdown(text, "t.md")
    assert (table.caption, table.values("forward (ms)")) == ("Times", [1.5, None])
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
    "x",
)
_CELLS = st.one_of(
    st.floats(allow_nan=False).map(repr), st.sampled_from(["", "0", "-1", "1e308", "2 ± 3", "4 GB", "OOM"])
)
_TEXTS = st.text(alphabet="xs=()MB+-*/^0123456789.| \n", max_size=60)


@given(st.lists(st.fixed_dictionaries(dict.fromkeys(_HEADINGS, _CELLS)), max_size=5), _TEXTS)
def test_no_table_breaks_the_detectors(rows: list[dict[str, str]], text: str) -> None:
    table = BenchmarkTable("t", _HEADINGS, tuple(rows), text=f"Memory grows linearly with seq_len.\nx (MB) = {text}")
    for found in inspect_tables([table, table]):
        assert found.message.strip()


@given(_TEXTS)
def test_no_text_breaks_the_reader(text: str) -> None:
    for table in [*read_markdown(text, "t"), *read_csv(text, "t")]:
        assert all(set(row) == set(table.headings) for row in table.rows)


def test_the_deviation_belongs_to_the_mean() -> None:
    rows = [{"forward_ms": 1.5, "forward_mean_ms": 100.0 + n, "forward_std_ms": 5.0} for n in range(3)]
    assert [found.code for found in inspect_tables([build_table("t", rows)]) if not found.is_note] == []


def test_what_was_worked_out_is_no_label() -> None:
    rows = [{"seq_len": s, "d_model": 16, "saved_MiB": 64 * s * s / 2**20, "bytes_per_seq2": 64.0, "growth": s / 7}
            for s in (256, 512, 1024)]  # fmt: skip
    table = build_table("t", rows)
    assert table.describe(1) == "seq_len 512"
    assert inspect_tables([table]) == []


def test_a_row_is_called_by_the_labels_that_it_has() -> None:
    rows: list[dict[str, object]] = [{"what": "attention", "size": None}, {"what": "model", "size": "small"}]
    table = build_table("t", [{**row, "forward_ms": 1.5} for row in rows])
    assert [table.describe(row) for row in (0, 1)] == ["what attention", "what model, size small"]
