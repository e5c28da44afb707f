"""Quantities on the command line: what each form means, and that nonsense is refused in one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profkit.cli.options import parse_bytes, parse_limit, parse_milliseconds, parse_percent, parse_share


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096 B", 4096),
        ("10MiB", 10 * 2**20),
        ("10MB", 10**7),
        ("40GiB", 40 * 2**30),
        ("40GB", 40 * 10**9),
        ("40gb", 40 * 10**9),
        ("1.5 GB", 15 * 10**8),
        ("0.1GB", 10**8),
        ("0.1GiB", 107_374_182),
        ("2k", 2048),
        ("2kB", 2000),
        ("1T", 2**40),
        ("1TB", 10**12),
        (" 3M ", 3 * 2**20),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1", "-1GiB", "nan", "inf", "1e9", "1.5", "1.5B", "1,000", "40XB", "40GiBs", "0x10", "1 2", "１GB"],
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|unit"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["5", " 5 ", "0"])
def test_a_limit_of_memory_names_its_unit(text: str) -> None:
    with pytest.raises(ValueError, match=f"{text.strip()} has no unit; write {text.strip()}GiB"):
        parse_limit(text)
    assert (parse_limit("5GiB"), parse_limit("5B")) == (5 * 2**30, 5)


@settings(deadline=None)
@given(st.integers(0, 2**60))
def test_plain_bytes_are_themselves(size: int) -> None:
    assert parse_bytes(str(size)) == size


@pytest.mark.parametrize(
    ("text", "share"),
    [("0%", 0.0), ("10%", 0.1), ("12.5 %", 0.125), ("100%", 1.0), ("10", 0.1), ("0.5%", 0.005), ("0", 0.0)],
)
def test_percentages(text: str, share: float) -> None:
    assert parse_percent(text) == share


@pytest.mark.parametrize("text", ["", "120", "120%", "100.1%", "-3%", "nan%", "inf%", "%", "ten%", "1e1%"])
def test_what_is_no_percentage(text: str) -> None:
    with pytest.raises(ValueError, match="not a percentage from 0% to 100%"):
        parse_percent(text)


def test_a_bare_number_below_one_is_ambiguous_and_refused() -> None:
    with pytest.raises(ValueError, match=r"'0\.1' is ambiguous; write 0\.1% or 10%"):
        parse_percent("0.1")


@pytest.mark.parametrize(("text", "time_ns"), [("120", 120_000_000), ("0.5", 500_000), ("34.123456", 34_123_456)])
def test_milliseconds(text: str, time_ns: int) -> None:
    assert parse_milliseconds(text) == time_ns


@pytest.mark.parametrize("text", ["", "0", "-5", "nan", "inf", "1e3", "120ms", "1/2"])
def test_text_that_is_not_a_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a number of milliseconds above 0"):
        parse_milliseconds(text)


def test_shares() -> None:
    assert parse_share("softmax=15%") == ("softmax", 0.15)
    assert parse_share("range:a=b=2%") == ("range:a=b", 0.02)


@pytest.mark.parametrize("text", ["softmax", "=3%", "softmax=", "softmax=x", " =3%"])
def test_text_that_is_not_a_share_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not NAME=PERCENT|not a percentage"):
        parse_share(text)


PARSERS = st.sampled_from([parse_bytes, parse_limit, parse_percent, parse_milliseconds, parse_share])


@settings(deadline=None)
@given(PARSERS, st.text(st.characters(codec="utf-8"), max_size=20))
def test_any_text_is_a_quantity_or_is_refused(parse: Callable[[str], object], text: str) -> None:
    said = ""
    try:
        parse(text)
    except ValueError as error:
        said = str(error)
    assert len(said.splitlines()) <= 1
