"""Documents: five renderings, numbers and text for people and programs, colour on a terminal."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profkit.analysis.compare.budgets import Budgets, check_budgets
from profkit.cli.outputs import _colour, has_colours
from profkit.errors import Finding
from profkit.reading import open_capture
from profkit.report import (
    csv_lines,
    cut_clauses,
    escape_latex,
    escape_markdown,
    json_text,
    make_visible,
    name_within,
    screen_width,
    shorten,
    shorten_apart,
    simplify_name,
)
from profkit.report.commands.compare import build_check_document
from profkit.report.document import (
    FORMATS,
    SCHEMA,
    Column,
    Document,
    Format,
    Labelled,
    Lines,
    Table,
    render,
    render_table,
)
from profkit.report.units import (
    NS,
    SHARE,
    TEXT,
    count_over,
    format_after,
    format_bytes,
    format_change,
    format_count,
    format_interval,
    format_ns,
    format_share,
    format_signed_ns,
    ns_over,
)
from tests.conftest import ROOT
from tests.golden import check_text

COLUMNS = (Column("time_ns", "time", NS), Column("share", "share", SHARE), Column("name", "name", TEXT, flexible=True))


def make_document(name: str = "gemm", **options: object) -> Document:
    table = Table(COLUMNS, [{"time_ns": 1500, "share": 0.25, "name": name}, {"time_ns": 7, "share": None, "name": "b"}])
    parts = (Lines(["what it is"], "head"), table, Lines(["how it adds up"]))
    return Document("kernels", {"trace": "t.sqlite", "rows": 2}, parts, table, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("style", FORMATS)
def test_each_format_prints_a_document_as_it_did(style: Format) -> None:
    """Exact values for programs, the same cells for people; failures and each warning once, notes in JSON alone."""
    check = [Finding("lost", "9 kernels lost", "failed"), Finding("usual", "says nothing", "note")]
    odd = [Finding("odd", "odd times"), Finding("strange", "odd times")]
    document = make_document(findings=odd, self_check=check)
    # Lines that are not shown add up without what cannot be added; a wide column is left out on a screen only.
    columns = (*COLUMNS, Column("domain", "domain", TEXT, wide=True))
    rows = [{"name": "a", "domain": "NCCL"}, {"name": "[b]", "share": 1.0}]
    more = Table(columns, rows, title="more", rest={"time_ns": 10, "name": "(3 more)"})
    labelled = Labelled([("STEP", "5 ms"), ("", "1 a change" + " and a change" * 6), ("CLOSED", "all")])
    parts = [*document.parts, more, Lines(["a *sentence*"], title="titled"), labelled]
    check_text(f"document-{style}", render(replace(document, parts=parts), style) + "\n")


def test_without_findings_json_has_no_self_check() -> None:
    data = json.loads(render(make_document(), "json"))
    assert (data["schema"], data["warnings"], "self_check" in data) == (SCHEMA, [], False)


def test_a_path_in_json_is_absolute_only_with_full_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "runs" / "t.sqlite")
    document = Document("kernels", {"trace": path, "memory": {"before": path}}, (), Table((), []))
    assert json.loads(render(document, "json"))["trace"] == "t.sqlite"
    assert json.loads(render(document, "json"))["memory"]["before"] == "t.sqlite", "within a part of it, too"
    assert json.loads(render(document, "json", full_names=True))["trace"] == path
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


# -- text ------------------------------------------------------------------------------------------------------------


JSON = st.recursive(
    st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


def test_shortening_keeps_both_ends_and_the_width() -> None:
    assert shorten("abc", 3) == "abc"
    assert shorten("abcdef", 5) == "ab…ef"
    assert shorten("abcdef", 4) == "a…ef"
    assert shorten("abc", 1) == "…"
    for width in range(1, 30):
        assert len(shorten("x" * 20 + "y" * 20, width)) == width


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("No rank is late: rank 1 costs most, 10 ms a step", "No rank is late: rank 1 costs most, 10 ms a step"),
        ("No rank is late: rank 1 costs 10.03 ms (22.4% of the step)", "No rank is late: rank 1 costs 10.03 ms …"),
        ("peak 12.92 GiB (h.0 2 GiB, and others of which there are many)", "peak 12.92 GiB …"),
        ("one clause that is longer by far than the line has room", "one clause that is longer by far than the line …"),
        ("x" * 60, "x" * 48 + " …"),
    ],
)
def test_a_sentence_is_cut_between_clauses_and_never_in_a_parenthesis(text: str, cut: str) -> None:
    assert cut_clauses(text, 50, " …") == cut


def test_names_that_differ_in_the_middle_alone_shorten_to_different_names() -> None:
    name = "cudnn_generated_fort_native_sdpa_sm90_flash_{}_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0"
    names = [name.format("fprop"), name.format("bprop"), "gemm", name.format("fprop")]
    assert shorten(names[0], 36) == shorten(names[1], 36)
    forward, backward, gemm, again = shorten_apart(names, 36)
    assert "fprop" in forward
    assert "bprop" in backward
    assert (gemm, again) == ("gemm", forward)
    for width in range(1, 100):
        assert all(len(short) <= width for short in shorten_apart(names, width))


def test_modules_of_one_block_shorten_to_different_names() -> None:
    parts = ("mlp", "block1", "block2", "res_conv", "norm", "to_qkv", "to_out")
    names = [f"     model.{side}.0.1.{part}" for side in ("downs", "ups") for part in parts]
    for side in (names[: len(parts)], names[len(parts) :]):
        assert len({*shorten_apart(side, 18)}) == len(parts)
    assert all(short.startswith("     ") and len(short) <= 18 for short in shorten_apart(names, 18))
    assert len({*shorten_apart(names, 20)}) == len(names)


@pytest.mark.parametrize(
    ("name", "parent", "rest"),
    [
        ("h.*.mlp", "h.*", "mlp"),
        ("ups.*.*", "ups.*", "ups.*.*"),
        ("ups.3", "ups", "ups.3"),
        ("mid_block1.mlp", "mid_block*", "mid_block1.mlp"),
        ("model", None, "model"),
    ],
)
def test_the_rest_of_a_modules_name_is_never_a_number_or_a_star_alone(name: str, parent: str | None, rest: str) -> None:
    assert name_within(name, parent) == rest


def test_a_name_that_is_too_long_gives_way_to_its_brief_one_if_that_fits() -> None:
    def show(width: int, full_names: bool = False) -> list[str]:
        column = Column("name", "name", TEXT, flexible=True, brief=lambda row: f"….{row['name'].rpartition('.')[2]}")
        rows: list[dict[str, Any]] = [
            {"name": name, "n": 1} for name in ("model.block.mlp", "model.block.projection", "h.0")
        ]
        table = Table((column, Column("n", "n" * 20)), rows)
        return [line.split()[0] for line in render_table(table, width=width, full_names=full_names).splitlines()[2:]]

    assert show(60) == ["model.block.mlp", "model.block.projection", "h.0"]
    assert show(40) == ["model.block.mlp", "….projection", "h.0"]
    assert show(34) == ["….mlp", "….projection", "h.0"]
    assert show(20, full_names=True) == show(60)


def test_columns_of_the_environment_are_obeyed_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, width in (("120", 120), ("72", 72), ("5", 40), ("", 80), ("wide", 80), ("0", 80)):
        monkeypatch.setenv("COLUMNS", columns)
        assert screen_width() == width


def test_a_control_character_shows_as_its_picture() -> None:
    assert make_visible("a\tb\nc\x1b[0m") == "a␉b␊c␛[0m"
    assert make_visible("layer 3 – µs, 注意力 😀") == "layer 3 – µs, 注意力 😀"


@given(JSON)
def test_json_is_ascii_without_control_characters_and_gives_back_what_was_put_in(data: Any) -> None:
    text = json_text(data)
    assert all(" " <= character <= "~" or character == "\n" for character in text)
    assert json.loads(text) == data
    assert json.loads(json_text({"trace": "a\udcff.sqlite"})) == {"trace": "a\ufffd.sqlite"}, "half a pair"


@pytest.mark.parametrize(
    ("name", "simple"),
    [
        ("void at::native::f<(int)4, float>(int, T2)", "f<float>"),
        ("void scan<scan<float>, (int)4, float>(float*)", "scan<float>"),
        ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn"),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x1_kernel0_0",
            "cudnn_sdpa_bprop_wgmma_f16_64x64x64_1x4x1",
        ),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, 10>(float*)", "softmax_warp_forward<float>"),
        ("f(a)(b)", "f(a)"),
        ("(x)", "(x)"),
        ("))))", "))))"),
        ("", ""),
        ("<a>", "<a>"),
        ("sm80_xmma_gemm_nt_n_tilesize64x64x8_stage3_ffma_execute_kernel__5x_cublas", "sm80_xmma_gemm_nt_n_64x64x8"),
        (
            "sm80_xmma_gemm_nt_n_tilesize64x64x8_stage3_ffma_execute_split_k_kernel__5x_cublas",
            "sm80_xmma_gemm_nt_n_64x64x8_split_k",
        ),
    ],
)
def test_a_simplified_name_keeps_what_is_special_about_a_kernel(name: str, simple: str) -> None:
    assert simplify_name(name) == simple


@given(st.text("()<>:,_ ab1", max_size=40))
def test_no_name_is_simplified_to_nothing(name: str) -> None:
    assert bool(simplify_name(name)) == bool(name)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1))
def test_csv_gives_back_what_was_put_in(names: list[str]) -> None:
    rows = list(csv.reader(io.StringIO(csv_lines(["name", "n"], [[name, 1] for name in names]) + "\n", newline="")))
    assert rows == [["name", "n"], *([name, "1"] for name in names)]


def test_latex_shows_every_character_as_it_is() -> None:
    assert escape_latex("\\&%$#_{}~^<>|--[x]") == (
        r"\textbackslash{}\&\%\$\#\_\{\}\textasciitilde{}\textasciicircum{}"
        r"\textless{}\textgreater{}\textbar{}-{}-{[}x]"
    )


def test_markdown_loses_no_part_of_a_name() -> None:
    assert escape_markdown("_f<float>(a*b|c)_x$y$ [z] `q` a_b") == r"\_f\<float>(a\*b\|c)\_x\$y\$ \[z] \`q\` a_b"


def test_a_long_list_is_written_with_a_line_for_each_item() -> None:
    data = {"few": [{"a": 1}], "many": [{"name": "a\nb", "share": 0.5}] * 3000, "none": None}
    text = json_text(data)
    assert json.loads(text) == data
    assert text.count("\n") == 3000 + 9
    assert text.splitlines()[5:8] == ["  ],", '  "many": [', '    {"name": "a\\nb", "share": 0.5},']


def test_a_shared_line_that_is_too_long_keeps_the_last_part_of_each_module() -> None:
    name = "  shared: transformer.h.* + transformer.h.*.ln_* + transformer.h.*.mlp.c_fc"
    assert shorten(name, 100) == name
    assert shorten(name, 40) == "  shared: h.* + ln_* + c_fc"
    assert shorten(name, 20) == "  shared:…n_* + c_fc"
    assert shorten("shared: " + "x" * 80, 20) == "shared: x…xxxxxxxxxx"


# -- numbers ---------------------------------------------------------------------------------------------------------


SHOWN: dict[Callable[..., str], dict[Any, str]] = {
    # Four digits at every boundary.
    format_ns: {
        **{0: "0 ns", 999: "999 ns", 1000: "1.000 µs", 9_999: "9.999 µs", 99_996: "100.0 µs", 999_949: "999.9 µs"},
        **{999_950: "1.000 ms", 999_999: "1.000 ms", 1_000_000: "1.000 ms", 9_999_600: "10.00 ms"},
        **{999_999_999: "1.000 s", 999_960_000_000: "1,000 s", -999_999: "-1.000 ms", -5: "-5 ns"},
    },
    format_signed_ns: {0: "0 ns", 12: "+12 ns", -12: "-12 ns", 1_500_000: "+1.500 ms", -999_960: "-1.000 ms"},
    ns_over(2).show: {25_000: "12.50 µs"},
    ns_over(None).show: {25_000: "25.00 µs"},
    # What is above 0 never shows as 0, and a part never as 100 %.
    format_share: {
        **{0.0: "0.0%", 1e-12: "<0.1%", 0.000499: "<0.1%", 0.0005: "0.1%", 0.5: "50.0%", 0.9994: "99.9%"},
        **{0.99951: ">99.9%", 0.9999999: ">99.9%", 1 - 1e-16: "100.0%", 1.0: "100.0%"},
    },
    # A change from next to nothing has no digits.
    format_change: {0.0: "+0%", -0.25: "-25%", 0.126: "+13%", 9.99: "+999%", 9.994: ">+999%", 106.47: ">+999%"},
    format_bytes: {
        **{0: "0 B", 999: "999 B", 1000: "0.977 KiB", 2**20: "1.000 MiB", int(99.9996 * 2**20): "100.0 MiB"},
        **{1018 * 2**20: "0.994 GiB", 2_867_200_000: "2.670 GiB", -(2**30): "-1.000 GiB"},
    },
    # A count per step has a decimal only where it needs one.
    count_over(2).show: {24: "12", 5: "2.5", 24_000: "12,000"},
    count_over(None).show: {7: "7"},
    # Both ends of an interval have the same unit.
    format_interval: {
        **{(-17_657, -12_940): "-17.66 … -12.94 µs", (-3, 12_000_000): "-0.00 … +12.00 ms"},
        **{(-120, 5): "-120 … +5 ns", (2_000_000_000, 2_500_000_000): "+2.000 … +2.500 s"},
        **{(123_456_000, 999_900_000): "+123.5 … +999.9 ms", (999_960, 999_970): "+1.000 … +1.000 ms"},
    },
    format_count: {(0, "kernel"): "0 kernels", (1, "kernel"): "1 kernel", (2422, "kernel"): "2,422 kernels"},
    format_after: {(5_000_000, 0): "5.000 s", (1500, 0): "1.500 ms", (None, 0): "—"},
}


@pytest.mark.parametrize("show", SHOWN)
def test_a_number_is_shown_to_people(show: Callable[..., str]) -> None:
    for value, shown in SHOWN[show].items():
        assert show(*(value if isinstance(value, tuple) else (value,))) == shown


@given(st.integers(1, 10**15))
def test_a_duration_is_shown_to_half_a_unit_of_its_fourth_digit(value: int) -> None:
    number, unit = format_ns(value).split()
    back = float(number.replace(",", "")) * {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}[unit]
    assert back == pytest.approx(value, rel=5.1e-4)
    assert len(re.sub(r"\D", "", number)) <= 4 or unit == "s"


@given(st.floats(0, 1e9))
def test_no_percentage_is_above_999(value: float) -> None:
    for shown in (format_share(value), format_change(value), format_change(value, 1)):
        assert float(shown.strip("<>+%")) <= 999


# -- colour ----------------------------------------------------------------------------------------------------------


TRACE = ROOT / "traces" / "small-train.nsys2025.sqlite"
_CODES = re.compile(r"\x1b\[[0-9;]*m")
RED = "\x1b[31m"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_only_a_terminal_without_no_color_has_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert has_colours(Terminal())
    assert not has_colours(io.StringIO())
    assert not has_colours(None)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colours(Terminal())
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "dumb")
    assert not has_colours(Terminal())


def test_red_is_the_row_of_a_broken_budget_and_nothing_else() -> None:
    budgets = Budgets(max_idle=0.5, max_shares=(("category:gemm", 0.9),))
    document = build_check_document(check_budgets(open_capture(TRACE), budgets))
    plain, coloured = render(document, "table"), render(document, "table", paint=_colour)
    assert _CODES.sub("", coloured) == plain
    red = [line for line in coloured.splitlines() if RED in line]
    assert [_CODES.sub("", line).split()[:2] for line in red] == [["BROKEN", "max-idle"]]


def shown_on_a_terminal(*arguments: str | Path, **environment: str) -> str:
    """Return what a command prints on a terminal of its own."""
    leader, follower = os.openpty()
    command = [sys.executable, "-m", "profkit", *map(str, arguments)]
    env = {**os.environ, "TERM": "xterm", **environment}
    with subprocess.Popen(command, stdout=follower, stderr=subprocess.DEVNULL, cwd=ROOT, env=env) as process:
        os.close(follower)
        found = b""
        while True:
            try:
                found += (part := os.read(leader, 65536))
            except OSError:  # the terminal's last user has gone
                break
            if not part:
                break
    os.close(leader)
    assert process.returncode == 0
    return found.decode()


def test_a_terminal_shows_what_a_pipe_gets_in_colour(oddly_named: Path) -> None:
    coloured = shown_on_a_terminal("kernels", oddly_named, NO_COLOR="")
    plain = shown_on_a_terminal("kernels", oddly_named, NO_COLOR="1")
    assert "\x1b[1m" in coloured
    assert "\x1b" not in plain
    assert _CODES.sub("", coloured) == plain
    assert "k␛[31m" in coloured
    assert RED not in coloured
