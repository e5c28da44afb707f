"""Each known mistake is found in a table that carries it, and nothing in the clean ones.

The figures in tables/ were published with five write-ups of the same experiments; headings are shortened.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.detectors import inspect_tables
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
def test_a_clean_table_has_no_mistakes(name: str) -> None:
    assert _mistakes(name) == []


def test_the_clean_tables_together_have_no_mistakes() -> None:
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
            "back avg (sec) is -0.00274821 at model S: no time is negative; it is forward+backward minus",
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
        ("attention_cuda.csv", "which 17.38 would be expected there: about 16.25 of the first cell is left"),
        (
            "attention_cuda.csv",
            "model mem grows with d_model to the power of 1.97, with context_length to the power of 0.04",
        ),
        ("shares.md", "4 of 4 shares of forward are those of shares.md, table 1, forward and backward"),
    ],
)
def test_a_mistake_is_reported_with_its_figures(name: str, said: str) -> None:
    assert any(said in message for _, message in _mistakes(name))


def test_forward_inside_backward_shows_against_another_table_of_the_same_cells() -> None:
    found = [message for code, message in _mistakes("attention_forward_inside.csv", "attention_clean.csv")
             if code == "forward-in-backward"]  # fmt: skip
    assert found == [
        "backward over forward is 3.36 at width 128 and length 16384, where attention_clean.csv has 2.09 "
        "(1.19 more, median of 12 cells): forward was timed inside backward"
    ]


def test_a_compiled_row_is_not_taken_for_the_eager_one_of_its_cell() -> None:
    def table(name: str, backward: float) -> BenchmarkTable:
        rows = [{"d_model": 16, "length": n, "mode": mode, "forward_ms": 10.0, "backward_ms": ms}
                for n in (256, 512, 1024) for mode, ms in (("eager", 20.0), ("compiled", backward))]  # fmt: skip
        return build_table(name, rows)

    found = inspect_tables([table("a", 29.0), table("b", 20.0)])
    assert "forward-in-backward" not in {each.code for each in found}


def test_slower_in_bf16_is_noted() -> None:
    notes = _notes("model_warm.csv", "model_bf16.csv")
    assert len(notes) == 4  # the largest size is faster
    # Its backward, 112.7 ms against 111.3 ms, is as long in both.
    assert "model XL: forward 54.76 ms against 49.8 ms: " in notes[3]
    assert notes[0].startswith(
        "slower in bf16 at model S: forward 11.55 ms against 10.12 ms, backward 16.25 ms against 14.12 ms: autocast"
    )


@pytest.mark.parametrize(("ms", "told"), [(122.8, []), (123.6, []), (128.9, []), (129.0, ["backward"])])
def test_slower_in_bf16_means_by_more_than_5_percent(ms: float, told: list[str]) -> None:
    """As it was on an H200: 123.6 ms in bf16 against 122.8 ms is as long."""
    rows = [{"dtype": "fp32", "forward_ms": 63.5, "backward_ms": 122.8}]
    rows += [{"dtype": "bf16", "forward_ms": 53.1, "backward_ms": ms}]
    notes = [found.message for found in inspect_tables([build_table("t", rows)]) if found.code == "bf16-slower"]
    assert [note.partition(": ")[2].partition(" ")[0] for note in notes] == told


def test_sizes_in_words_identify_rows_although_one_looks_like_a_number() -> None:
    sizes = ("small", "medium", "large", "2.7B")
    wide = [{"size": size, "dtype": "fp32", "forward (s)": 0.1} for size in sizes]
    narrow = [{"size": size, "dtype": "bf16", "forward (s)": 0.15 if size == "small" else 0.05} for size in sizes]
    notes = [found.message for found in inspect_tables([build_table("t", wide + narrow)])]
    assert len(notes) == 1
    assert "slower in bf16 at size small: forward 150 ms against 100 ms: " in notes[0]


def test_slower_in_bf16_is_launch_bound_if_half_the_work_takes_as_long() -> None:
    wide = [{"context": size, "dtype": "fp32", "forward (s)": 0.1} for size in (128, 256)]
    narrow = [{"context": size, "dtype": "bf16", "forward (s)": 0.15} for size in (128, 256)]
    notes = [found.message for found in inspect_tables([build_table("t", wide + narrow)])]
    said = ": launch-bound: from context 128 to 256, 2 times the context, forward takes 1.00 times as long"
    assert [note.endswith(said) for note in notes] == [True, True]


# Medians of ten steps on an H200 whose host was busy; sizes are words, and the parameters tell their order.
_BUSY = [
    ("small", 128_625_408, "fp32", 14.6556, 26.767), ("small", 128_625_408, "bf16", 25.4394, 31.2922),
    ("medium", 423_183_360, "fp32", 28.167, 52.7138), ("medium", 423_183_360, "bf16", 60.7076, 67.208),
    ("large", 969_411_840, "fp32", 62.7159, 122.672), ("large", 969_411_840, "bf16", 56.3225, 69.7814),
    ("2.7B", 3_406_809_600, "fp32", 170.287, 342.669), ("2.7B", 3_406_809_600, "bf16", 63.7786, 81.7674),
]  # fmt: skip


def _busy(**more: object) -> BenchmarkTable:
    keys = ("size", "parameters", "dtype", "forward_ms", "backward_ms")
    return build_table("t", [{**dict(zip(keys, row, strict=True)), **more} for row in _BUSY])


def test_sizes_in_words_are_ordered_by_their_parameters() -> None:
    notes = [found.message for found in inspect_tables([_busy(kernels=645, tokens_per_s=1.5, batch=4, warmup=5)])]
    assert notes == [
        "slower in bf16 at size small: forward 25.44 ms against 14.66 ms, backward 31.29 ms against 26.77 ms: "
        "launch-bound: from size small to 2.7B, 26.5 times the parameters, forward takes 2.51 times as long",
        "slower in bf16 at size medium: forward 60.71 ms against 28.17 ms, backward 67.21 ms against 52.71 ms: "
        "launch-bound: from size medium to large, 2.29 times the parameters, forward takes 0.93 times as long",
    ]


def _falling(table: BenchmarkTable) -> list[str]:
    return [found.message for found in inspect_tables([table]) if found.code == "falls-with-size" and found.is_note]


def test_a_time_that_falls_as_a_size_grows_is_noted() -> None:
    rows = [{"size": "small", "context": context, "forward_ms": ms}
            for context, ms in ((128, 21.97), (256, 14.66), (512, 20.6), (1024, 42.66))]  # fmt: skip
    assert _falling(build_table("t", rows)) == [
        "forward_ms falls as a size grows, in 1 of 3 pairs of rows that differ in it alone, most: 21.97 at context "
        "128, 14.66 at context 256; launches limit the smaller one, or something disturbed it"
    ]
    # By 10 % or less it may be chance; under 1 ms another note says so of all rows.
    assert _falling(build_table("t", [{"context": c, "forward_ms": ms} for c, ms in ((128, 10.0), (256, 9.1))])) == []
    assert _falling(build_table("t", [{"context": c, "forward_ms": ms} for c, ms in ((128, 0.9), (256, 0.5))])) == []
    # Two sizes at once, or what is no size, are not compared.
    both = [{"context": c, "batch": b, "forward_ms": ms} for c, b, ms in ((128, 8, 10.0), (256, 4, 5.0))]
    assert _falling(build_table("t", both)) == []
    assert _falling(build_table("t", [{"warmup": n, "forward_ms": ms} for n, ms in ((1, 10.0), (5, 5.0))])) == []


def test_models_are_compared_by_their_parameters() -> None:
    rows = [{"size": size, "d_ff": count // 3, "parameters": count, "mode": mode, "forward_ms": ms, "kernels": count}
            for size, count, ms in (("large", 969, 27.9), ("xl", 1998, 26.5), ("2.7B", 3407, 22.9))
            for mode in ("eager", "compiled")]  # fmt: skip
    (said,) = _falling(build_table("t", rows))
    assert "in 2 of 4 pairs" in said
    assert "26.5 at size xl, d_ff 666, mode compiled, 22.9 at size 2.7B" in said


# Medians of ten steps in bf16 at context 256 on an H200, whose kernels are so short that launches bound them.
_PASSES = [
    ("large", "forward-backward", 71.18, 123.6), ("large", "train", 54.3, 72.54),
    ("xl", "forward-backward", 98.8, 122.4),
    ("2.7B", "forward-backward", 57.87, 130.1), ("2.7B", "train", 44.54, 64.03),
]  # fmt: skip


def _of_passes(rows: Sequence[tuple[object, ...]], kind: str = "passes", unit: str = "ms") -> BenchmarkTable:
    keys = ("size", kind, f"forward ({unit})", f"backward ({unit})")
    return build_table("t", [dict(zip(keys, row, strict=True)) for row in rows])


def _disagreeing(table: BenchmarkTable) -> list[str]:
    return [found.message for found in inspect_tables([table]) if found.code == "disagreeing-passes" and found.is_note]


def test_a_phase_that_depends_on_the_kind_of_step_is_noted() -> None:
    assert _disagreeing(_of_passes(_PASSES)) == [
        "a phase takes different times in forward-backward and in train, by over 25% in 2 of 2 pairs of rows that "
        "differ only in passes, most: forward 57.87 ms and 44.54 ms, backward 130.1 ms and 64.03 ms at size 2.7B; "
        "forward 71.18 ms and 54.3 ms, backward 123.6 ms and 72.54 ms at size large; "
        "launches limit one, or something disturbed it"
    ]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("step", ("fwd+bwd", "fwd+bwd+optimizer")),
        ("What", ("Forward & backward", "Training")),
        ("mode", ("fwd/back", "train")),
    ],
)
def test_kinds_of_step_are_recognized_in_any_column(kind: str, names: tuple[str, str]) -> None:
    both, train = names
    table = _of_passes([("s", both, 0.1, 0.2), ("s", train, 0.1, 0.26)], kind, "s")
    (said,) = _disagreeing(table)
    assert f"in {both} and in {train}, by over 25% in 1 of 1 pairs of rows that differ only in {kind}, " in said
    assert "most: backward 200 ms and 260 ms at row 1; " in said


@pytest.mark.parametrize(
    "rows",
    [
        # By 25 % of the shorter and less.
        [("s", "forward-backward", 10.0, 25.0), ("s", "train", 12.5, 20.0)],
        # Forward alone, which runs without autograd.
        [("s", "forward", 10.0, None), ("s", "forward-backward", 20.0, 40.0), ("s", "train", 20.0, 40.0)],
        # Under 1 ms on both sides.
        [("s", "forward-backward", 0.5, 0.9), ("s", "train", 0.9, 0.6)],
        # Not alike in all else.
        [("s", "forward-backward", 10.0, 20.0), ("m", "train", 20.0, 40.0)],
        # Not measured.
        [("s", "forward-backward", 10.0, 20.0), ("s", "train", None, None)],
        # Another kind of column by that name: how many passes were timed.
        [("s", "100", 10.0, 20.0), ("s", "200", 20.0, 40.0)],
    ],
)
def test_passes_that_agree_are_not_noted(rows: list[tuple[object, ...]]) -> None:
    assert _disagreeing(_of_passes(rows)) == []


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
    (note,) = inspect_tables([table])
    assert note.message.startswith("slower in bf16 at size small: forward 12 ms against 10 ms: ")


def test_mib_labelled_mb_is_found() -> None:
    text = (TABLES / "attention_clean.csv").read_text().replace("MiB", "MB")
    codes = [found.code for found in inspect_tables([read_csv(text, "t.csv")[0]]) if not found.is_note]
    assert codes == ["unit-label", "unit-label"]


def test_true_megabytes_are_not_mistaken_for_mib() -> None:
    rows = [{"seq_len": 100 * n, "peak_MB": f"{2.0 * 1.37**n + n / 7:.2f}"} for n in range(1, 40)]
    assert inspect_tables([build_table("t", rows)]) == []


def test_two_units_of_one_quantity_must_convert() -> None:
    right = [{"peak_MiB": 1024.0 * n, "peak_GiB": 1.0 * n} for n in (1, 2, 3)]
    wrong = [{"peak_MiB": 1024.0 * n, "peak_GiB": 1.024 * n} for n in (1, 2, 3)]
    assert inspect_tables([build_table("t", right)]) == []
    (found,) = inspect_tables([build_table("t", wrong)])
    assert (found.code, found.message) == (
        "unit-conversion", "peak_MiB 1024 is 1 in gib, and peak_GiB says 1.024 (row 1)"
    )  # fmt: skip


def test_identical_columns_are_found() -> None:
    rows = [{"forward_ms": n, "backward_ms": n} for n in (1.5, 2.5, 3.5)]
    assert "identical-columns" in {found.code for found in inspect_tables([build_table("t", rows)])}


def test_empty_columns_are_not_identical() -> None:
    counts = [{"compiled_graphs": n, "allocator_retries": n} for n in (0, 0, 0, None)]
    assert inspect_tables([build_table("t", counts)]) == []
    times = [{"forward_ms": n, "step_ms": n} for n in (1.5, 2.5, 3.5, None)]
    (found,) = inspect_tables([build_table("t", times)])
    assert found.message == "forward_ms and step_ms are identical in all 3 rows"


def test_launch_bound_rows_are_never_judged() -> None:
    rows = [{"forward_ms": 0.5, "backward_ms": 5.0 + n} for n in range(3)]
    (note,) = inspect_tables([build_table("t", rows)])
    assert (note.code, note.is_note) == ("launch-bound", True)


def test_attention_with_correct_axes_is_not_reported() -> None:
    rows = [{"d_model": d, "seq_len": s, "peak_MiB": 64 * s * s / 2**20 + d * s / 2**15}
            for d in (16, 32, 64) for s in (256, 512, 1024)]  # fmt: skip
    assert inspect_tables([build_table("t", rows)]) == []


def test_a_claim_that_holds_is_not_reported() -> None:
    table = read_tables(TABLES / "attention_linear.md")[0]
    for text in ("Memory grows quadratically with the sequence length.", "Memory is not linear in sequence length."):
        other = BenchmarkTable(table.name, table.headings, table.rows, text=text)
        assert "exponent-claim" not in {found.code for found in inspect_tables([other])}


def test_a_first_sample_far_from_the_others_is_an_outlier() -> None:
    assert differs_at_first([80.0, 10.0, 10.1, 9.9, 10.0])
    assert not differs_at_first([10.4, 10.0, 10.1, 9.9, 10.0])
    assert not differs_at_first([80.0, 10.0])


def test_a_cell_without_a_number_is_none() -> None:
    rows = [{"seq_len": 256, "forward_ms": 1.5, "backward_ms": None, "status": "OOM(backward)"}] * 3
    assert inspect_tables([build_table("t", rows)]) == []


def test_markdown_with_text_between_tables_is_read() -> None:
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


@given(st.lists(st.fixed_dictionaries(dict.fromkeys(_HEADINGS, _CELLS)), max_size=5), _TEXTS)
def test_no_table_breaks_the_detectors(rows: list[dict[str, str]], text: str) -> None:
    table = BenchmarkTable("t", _HEADINGS, tuple(rows), text=f"Memory grows linearly with seq_len.\nx (MB) = {text}")
    for found in inspect_tables([table, table]):
        assert found.message.strip()


@given(_TEXTS)
def test_no_text_breaks_the_reader(text: str) -> None:
    for table in [*read_markdown(text, "t"), *read_csv(text, "t")]:
        assert all(set(row) == set(table.headings) for row in table.rows)


def test_a_deviation_belongs_to_its_mean() -> None:
    rows = [{"forward_ms": 1.5, "forward_mean_ms": 100.0 + n, "forward_std_ms": 5.0} for n in range(3)]
    assert [found.code for found in inspect_tables([build_table("t", rows)]) if not found.is_note] == []


def test_a_computed_column_is_no_label() -> None:
    rows = [{"seq_len": s, "d_model": 16, "saved_MiB": 64 * s * s / 2**20, "bytes_per_seq2": 64.0, "growth": s / 7}
            for s in (256, 512, 1024)]  # fmt: skip
    table = build_table("t", rows)
    assert table.describe(1) == "seq_len 512"
    assert inspect_tables([table]) == []
