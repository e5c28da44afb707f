"""JSON read piece by piece is what Python's decoder reads at once, whole or damaged, and takes less memory."""

from __future__ import annotations

import gzip
import io
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profkit.errors import TraceError
from profkit.trace import json_stream
from profkit.trace.json_stream import CutOffError, JsonError, JsonStream
from profkit.trace.kineto import read_kineto
from profkit.trace.kineto_events import load_chrome_trace
from tests.child import run_in_child
from tests.conftest import ROOT
from tests.kineto_builder import row

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def stream_of(text: bytes, piece: int) -> JsonStream:
    source = io.BytesIO(text)
    return JsonStream(lambda _: source.read(piece))


def read_list(stream: JsonStream) -> list[Any]:
    found = list(stream.items())
    stream.end()
    return found


@settings(max_examples=150, deadline=None)
@given(st.lists(VALUES, max_size=5), st.integers(1, 40), st.sampled_from([None, 1]), st.booleans())
def test_pieces_of_any_size_give_what_the_whole_gives(
    values: list[Any], piece: int, indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    expected = json.loads(text.decode("utf-8", "replace"), parse_float=str, parse_constant=str)
    assert read_list(stream_of(text, piece)) == expected


@settings(max_examples=150, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=3), st.integers(1, 40), st.data())
def test_a_damaged_text_is_refused_where_the_whole_would_be(values: list[Any], piece: int, data: st.DataObject) -> None:
    text = json.dumps(values)
    at = data.draw(st.integers(0, len(text) - 1))
    mutant = text[:at] + data.draw(st.sampled_from(["", ",", "]", "}", '"', "x", "\n", "\\"])) + text[at + 1 :]
    try:
        expected = json.loads(mutant, parse_float=str, parse_constant=str)
    except ValueError:
        expected = None
    try:
        found = read_list(stream_of(mutant.encode(), piece))
    except JsonError:
        found = None
    assert found == (expected if isinstance(expected, list) else None)


def test_an_error_names_its_line_and_column_whatever_the_pieces() -> None:
    text = b'[{"a": 1},\n {"b": 2},\n {"c" 3},\n {"d": 4}, {"e": "long enough to go on"}]'
    for piece in (1, 5, 1000):
        with pytest.raises(JsonError, match=r"line 3, column 7: Expecting ':' delimiter"):
            read_list(stream_of(text, piece))


@pytest.mark.parametrize("text", [b'[{"a": 1}, {"b"', b'[{"a": 1}', b"[tru", b'["abc', b"[1,", b"[", b'[{"a": 1},'])
def test_a_text_that_ends_early_is_cut_off(text: bytes) -> None:
    for piece in (1, 1000):
        with pytest.raises(CutOffError):
            read_list(stream_of(text, piece))


def test_what_is_no_number_in_cpp_is_read_as_null() -> None:
    text = b'[{"a": inf, "b": [-nan, "inf; nan"]}, {"c": nan}, inf, -inf]'
    for piece in (1, 7, 1000):
        assert read_list(stream_of(text, piece)) == [{"a": None, "b": [None, "inf; nan"]}, {"c": None}, None, None]


def test_events_may_stand_anywhere_and_the_last_list_of_them_counts(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    event = json.dumps(row("cpu_op", "aten::mm", 1, 5))
    path.write_text(f'{{"a": [1], "traceEvents": [], "b": {{"traceEvents": []}}, "traceEvents": [{event}], "c": 2}}')
    header, rows = load_chrome_trace(path)
    assert header == {"a": [1], "b": {"traceEvents": []}, "c": 2}
    assert [event["name"] for event in rows["operator"]] == ["aten::mm"]


def test_a_trace_takes_at_most_two_and_a_half_times_its_size(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.decompress((ROOT / "traces" / "small-train.kineto.json.gz").read_bytes()))
    size = path.stat().st_size
    read_kineto(path)

    def grown() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        read_kineto(path)
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024

    # Besides the events there are the pieces of text that are read, of 4 MiB, however large the file is.
    assert run_in_child(grown, cpu_seconds=60) < 2.5 * size + 4 * json_stream._PIECE_BYTES


@pytest.mark.parametrize("beginning", [b'{"traceEvents": [', b'{"traceEvents": ["', b'{"x": "'])
def test_a_zipped_trace_is_stopped_while_it_is_inflated(tmp_path: Path, beginning: bytes) -> None:
    path = tmp_path / "bomb.json.gz"
    with gzip.open(path, "wb", 1) as file:
        file.write(beginning)
        for _ in range(80):
            file.write(b" " * 2**20)

    def read() -> str:
        with pytest.raises(TraceError) as caught:
            read_kineto(path)
        return str(caught.value)

    assert "more than 0.0625 GiB of JSON" in run_in_child(read, cpu_seconds=20, memory_bytes=2**30)


def test_many_small_events_cannot_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "many.json.gz"
    with gzip.open(path, "wb", 1) as file:
        file.write(b"[")
        for _ in range(400):
            file.write(b'{"ph":"X","cat":"kernel"},' * 2000)
    # In a fork, memory that earlier tests have freed would serve again, and the limit is on growth.
    code = (
        "import sys, profkit.files as files, profkit.trace.json_stream as stream\n"
        "from profkit.trace.kineto import read_kineto\n"
        "files.LEAST_MEMORY_BYTES, stream._PIECE_BYTES = 2**27, 2**20\n"
        "read_kineto(sys.argv[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert "too large for this machine's memory" in done.stderr.splitlines()[-1]
