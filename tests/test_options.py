"""Quantities on the command line: what each form means, and that nonsense is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profkit.cli.options import parse_bytes, parse_limit, parse_milliseconds, parse_percent, parse_share

Parse = Callable[[str], Any]

MEANT: dict[Parse, dict[str, Any]] = {
    parse_bytes: {
        **{"0": 0, "4096": 4096, "4096 B": 4096, "10MiB": 10 * 2**20, "10MB": 10**7, " 3M ": 3 * 2**20},
        **{"40GiB": 40 * 2**30, "40GB": 40 * 10**9, "40gb": 40 * 10**9, "1.5 GB": 15 * 10**8, "0.1GB": 10**8},
        **{"0.1GiB": 107_374_182, "2k": 2048, "2kB": 2000, "1T": 2**40, "1TB": 10**12},
    },
    parse_limit: {"5GiB": 5 * 2**30, "5B": 5},
    parse_percent: {"0%": 0.0, "10%": 0.1, "12.5 %": 0.125, "100%": 1.0, "10": 0.1, "0.5%": 0.005, "0": 0.0},
    parse_milliseconds: {"120": 120_000_000, "0.5": 500_000, "34.123456": 34_123_456},
    parse_share: {"softmax=15%": ("softmax", 0.15), "range:a=b=2%": ("range:a=b", 0.02)},
}

REFUSED: list[tuple[Parse, list[str], str]] = [
    (parse_bytes, ["", "GiB", "-1", "-1GiB", "nan", "inf", "1e9", "1.5", "1.5B", "1,000"], "size|unit"),
    (parse_bytes, ["40XB", "40GiBs", "0x10", "1 2", "１GB"], "size|unit"),
    (parse_limit, ["5", " 5 "], "5 has no unit; write 5GiB"),
    (parse_limit, ["0"], "0 has no unit; write 0GiB"),
    (parse_percent, ["", "120", "120%", "100.1%", "-3%", "nan%", "inf%", "%", "ten%", "1e1%"], "from 0% to 100%"),
    (parse_percent, ["0.1"], r"'0\.1' is ambiguous; write 0\.1% or 10%"),
    (parse_milliseconds, ["", "0", "-5", "nan", "inf", "1e3", "120ms", "1/2"], "not a number of milliseconds above 0"),
    (parse_share, ["softmax", "=3%", "softmax=", "softmax=x", " =3%"], "not NAME=PERCENT|not a percentage"),
]


@pytest.mark.parametrize("parse", MEANT)
def test_each_form_of_a_quantity_is_read(parse: Parse) -> None:
    assert {text: parse(text) for text in MEANT[parse]} == MEANT[parse]


@pytest.mark.parametrize(("parse", "texts", "reason"), REFUSED)
def test_what_is_no_quantity_is_refused_with_the_reason(parse: Parse, texts: list[str], reason: str) -> None:
    for text in texts:
        with pytest.raises(ValueError, match=reason):
            parse(text)


@settings(deadline=None)
@given(st.integers(0, 2**60))
def test_plain_bytes_are_themselves(size: int) -> None:
    assert parse_bytes(str(size)) == size


@settings(deadline=None)
@given(st.sampled_from(list(MEANT)), st.text(st.characters(codec="utf-8"), max_size=20))
def test_any_text_is_a_quantity_or_is_refused_in_one_line(parse: Parse, text: str) -> None:
    said = ""
    try:
        parse(text)
    except ValueError as error:
        said = str(error)
    assert len(said.splitlines()) <= 1
