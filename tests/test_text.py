"""Text shows as it is: nothing lost, nothing that a terminal, LaTeX, Markdown or a parser would obey."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profkit.report.text import (
    csv_lines,
    escape_latex,
    escape_markdown,
    json_text,
    make_visible,
    screen_width,
    shorten,
    shorten_apart,
    simplify_name,
)

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


def test_json_of_half_a_pair_is_still_unicode() -> None:
    assert json.loads(json_text({"trace": "a\udcff.sqlite"})) == {"trace": "a\ufffd.sqlite"}


@pytest.mark.parametrize(
    ("name", "simple"),
    [
        ("void at::native::f<(int)4, float>(int, T2)", "f<float>"),
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
