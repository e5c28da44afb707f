"""How names and numbers become text: nothing lost, nothing that a terminal, LaTeX, Markdown or a parser would obey."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profkit.files import write_whole
from profkit.report.formats import (
    Column,
    Table,
    make_visible,
    render_csv,
    render_json,
    render_latex,
    render_markdown,
    render_table,
    shorten,
)
from profkit.report.text import simplify_name
from profkit.report.units import format_bytes, format_count, format_interval, format_ns, format_share, format_signed_ns

ESCAPE = "\x1b[31mred\x1b[0m"


def one_cell(text: str) -> Table:
    return Table((Column("name", "name", right=False, flexible=True),), [[text]], [[text]])


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1000, "1.000 µs"),
        (9_999, "9.999 µs"),
        (99_996, "100.0 µs"),
        (999_949, "999.9 µs"),
        (999_950, "1.000 ms"),
        (999_999, "1.000 ms"),
        (1_000_000, "1.000 ms"),
        (9_999_600, "10.00 ms"),
        (999_999_999, "1.000 s"),
        (999_960_000_000, "1,000 s"),
        (-999_999, "-1.000 ms"),
        (-5, "-5 ns"),
    ],
)
def test_durations_have_four_digits_at_every_boundary(value: int, shown: str) -> None:
    assert format_ns(value) == shown


@given(st.integers(1, 10**15))
def test_a_duration_is_shown_to_half_a_unit_of_its_fourth_digit(value: int) -> None:
    number, unit = format_ns(value).split()
    back = float(number.replace(",", "")) * {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}[unit]
    assert back == pytest.approx(value, rel=5.1e-4)
    assert len(re.sub(r"\D", "", number)) <= 4 or unit == "s"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0.0%"),
        (1e-12, "<0.1%"),
        (0.000499, "<0.1%"),
        (0.0005, "0.1%"),
        (0.5, "50.0%"),
        (0.9994, "99.9%"),
        (0.99951, ">99.9%"),
        (0.9999999, ">99.9%"),
        (1 - 1e-16, "100.0%"),
        (1.0, "100.0%"),
    ],
)
def test_a_share_is_never_shown_as_nothing_nor_a_part_as_all(value: float, shown: str) -> None:
    assert format_share(value) == shown


def test_counts_and_bytes() -> None:
    assert [format_count(n, "kernel") for n in (0, 1, 2422)] == ["0 kernels", "1 kernel", "2,422 kernels"]
    assert format_bytes(int(99.9996 * 2**20)) == "100.0 MiB"


def test_shortening_keeps_both_ends_and_the_width() -> None:
    assert shorten("abc", 3) == "abc"
    assert shorten("abcdef", 5) == "ab…ef"
    assert shorten("abcdef", 4) == "a…ef"
    assert shorten("abc", 1) == "…"
    for width in range(1, 30):
        assert len(shorten("x" * 20 + "y" * 20, width)) == width


def test_a_table_fits_its_width_unless_told_to_be_full() -> None:
    table = Table((Column("n", "n"), Column("name", "name", right=False, flexible=True)), [["1", "k" * 200]], [])
    assert max(map(len, render_table(table, width=80).splitlines())) == 80
    assert "k" * 200 in render_table(table, full=True)
    assert len(render_table(Table(table.columns, [], [])).splitlines()) == 2


@pytest.mark.parametrize(
    "character", ["\x00", "\x1b", "\x07", "\r", "\n", "\x7f", "\x9b", "\u2028", "\u202e", "\udcff"]
)
def test_no_control_character_reaches_a_reader(character: str) -> None:
    table = one_cell(f"a{character}b")
    for render in (render_table, render_markdown, render_latex):
        text = render(table)  # type: ignore[operator]
        # A break of any kind would add a line.
        assert len(text.splitlines()) == len(render(one_cell("ab")).splitlines())  # type: ignore[operator]
        assert character == "\n" or character not in text
        text.encode()


def test_what_is_replaced_shows_as_a_picture() -> None:
    assert make_visible("a\tb\nc\x1b[0m") == "a␉b␊c␛[0m"
    assert make_visible("layer 3 – µs, 注意力 😀") == "layer 3 – µs, 注意力 😀"


def test_latex_sets_every_character_as_it_is() -> None:
    row = render_latex(one_cell("\\&%$#_{}~^<>|--[x]")).splitlines()[4]
    assert row == (
        r"\textbackslash{}\&\%\$\#\_\{\}\textasciitilde{}\textasciicircum{}"
        r"\textless{}\textgreater{}\textbar{}-{}-{[}x] \\"
    )


def test_a_row_of_latex_begins_no_argument() -> None:
    rows = render_latex(Table((Column("n", "n"),), [["a"], ["[b]"]], [])).splitlines()
    assert not any(row.startswith("[") for row in rows)


def test_markdown_loses_no_part_of_a_name() -> None:
    row = render_markdown(one_cell("_f<float>(a*b|c)_x$y$ [z] `q` a_b")).splitlines()[2]
    assert row == r"| \_f\<float>(a\*b\|c)\_x\$y\$ \[z] \`q\` a_b |"


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1))
def test_csv_gives_back_what_was_put_in(names: list[str]) -> None:
    table = Table((Column("name", "name"), Column("n", "n")), [], [[name, 1] for name in names])
    rows = list(csv.reader(io.StringIO(render_csv(table) + "\n", newline="")))
    assert rows == [["name", "n"], *([name, "1"] for name in names)]


JSON = st.recursive(
    st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@given(JSON)
def test_json_is_ascii_without_control_characters_and_gives_back_what_was_put_in(data: Any) -> None:
    text = render_json(data)
    assert all(" " <= character <= "~" or character == "\n" for character in text)
    assert json.loads(text) == data


def test_json_of_half_a_pair_is_still_unicode() -> None:
    assert json.loads(render_json({"trace": "a\udcff.sqlite"})) == {"trace": "a\ufffd.sqlite"}


@pytest.mark.parametrize(
    ("name", "simple"),
    [
        ("void at::native::f<(int)4, float>(int, T2)", "f<float>"),
        ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn"),
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
def test_a_simplified_name_is_what_tells_a_kernel_apart(name: str, simple: str) -> None:
    assert simplify_name(name) == simple


@given(st.text("()<>:,_ ab1", max_size=40))
def test_no_name_is_simplified_to_nothing(name: str) -> None:
    assert bool(simplify_name(name)) == bool(name)


def test_a_file_is_written_whole_with_the_mode_that_it_had(tmp_path: Path) -> None:
    path = tmp_path / "r.txt"
    write_whole(path, b"one")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()
    path.chmod(0o600)
    write_whole(path, b"two")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"two", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_keeps_pointing_and_a_long_name_is_no_obstacle(tmp_path: Path) -> None:
    target = tmp_path / ("n" * 250)
    target.write_bytes(b"old")
    link = tmp_path / "link"
    link.symlink_to(target)
    write_whole(link, b"new")
    assert (link.is_symlink(), target.read_bytes()) == (True, b"new")


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.txt"
    path.write_bytes(b"old")

    def fail(partial: Path, target: Path) -> None:
        raise OSError(28, "No space left on device", str(partial), None, str(target))

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space left") as caught:
        write_whole(path, b"new")
    assert caught.value.filename == str(path)
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"old", [path])


def test_a_full_disk_is_noticed_before_the_old_file_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small result stays in the buffer until the file is closed: only then does a full disk show."""
    path = tmp_path / "r.txt"
    path.write_bytes(b"old")
    replaced = []
    real = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: (replaced.append(self.read_bytes()), real(self, to)))
    write_whole(path, b"new")
    assert replaced == [b"new"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0 ns"), (12, "+12 ns"), (-12, "-12 ns"), (1_500_000, "+1.500 ms"), (-999_960, "-1.000 ms")],
)
def test_a_change_has_its_sign(value: int, shown: str) -> None:
    assert format_signed_ns(value) == shown


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (-17_657, -12_940, "-17.66 … -12.94 µs"),
        (-3, 12_000_000, "-0.00 … +12.00 ms"),
        (-120, 5, "-120 … +5 ns"),
        (2_000_000_000, 2_500_000_000, "+2.000 … +2.500 s"),
        (123_456_000, 999_900_000, "+123.5 … +999.9 ms"),
        (999_960, 999_970, "+1.000 … +1.000 ms"),
    ],
)
def test_an_interval_has_one_unit(low: int, high: int, shown: str) -> None:
    assert format_interval(low, high) == shown
