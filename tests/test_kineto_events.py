"""The events of a Chrome trace: bytes, JSON read piece by piece, times and fields, damaged ones too."""

from __future__ import annotations

import gc
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
from profkit.trace.kineto_events import load_chrome_trace, parse_microseconds
from tests.child import run_in_child
from tests.conftest import ROOT
from tests.kineto_builder import PID, TID, kernel, launch, read, row, work_names, written


def test_an_end_beyond_a_century_is_impossible(tmp_path: Path) -> None:
    trace = read(tmp_path, [launch(1, 1), kernel("k", 2, 5, 1), kernel("h", 4 * 10**15, 4 * 10**15, 0)])
    assert work_names(trace) == ["k"]
    assert [diagnostic.severity for diagnostic in trace.diagnostics] == ["error"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4336530559579.979", 4336530559579979),
        ("1700000000000000.123", 1700000000000000123),  # as a double it would end in .125
        ("0.5", 500),
        ("2.1", 2100),
        ("7", 7000),
        ("-3.25", -3250),
        ("1.5e3", 1_500_000),
        ("0.0004", 0),
        ("0.0005", 0),  # half to even
        ("12.34567", 12346),
        (17, 17000),
        ("NaN", None),
        ("Infinity", None),
        ("1e999999999", None),
        ("1e-999999999", 0),
        ("sNaN", None),
        ("9" * 30, None),
        (2**70, None),
        ("soon", None),
        ("", None),
        ("1.", 1000),
        ("²", None),
        (None, None),
        ([], None),
    ],
)
def test_a_time_in_microseconds_becomes_integer_nanoseconds_or_nothing(text: object, expected: int | None) -> None:
    assert parse_microseconds(text) == expected


@given(st.integers(0, 2**61))
def test_microseconds_are_exact(ns: int) -> None:
    assert parse_microseconds(f"{ns // 1000}.{ns % 1000:03d}") == ns


def test_times_of_a_file_are_exact(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(
        '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1700000000000000.123,'
        ' "dur": 2.049, "args": {"memory bandwidth (GB/s)": inf, "x": -nan}}]}'
    )
    trace = read_kineto(path)
    assert trace.work.start_ns.tolist() == [1700000000000000123]
    assert trace.work.duration_ns.tolist() == [2049]


def test_rows_of_unexpected_shape_are_ignored(tmp_path: Path) -> None:
    odd = [
        row("Trace", "PyTorch Profiler (0)", 0, 100, "PyTorch Profiler", pid="Spans"),
        {"ph": "i", "name": "Iteration Start", "pid": "Traces", "tid": "Trace", "ts": 1},
        row("user_annotation", "nowhere", 1, 5, pid="Spans"),
        {"ph": "X", "cat": "user_annotation", "name": "timeless", "pid": PID, "tid": TID},
        {"ph": "M", "name": "thread_name", "pid": PID, "tid": TID, "args": None},
        {"ph": "f", "cat": "fwdbwd", "id": [], "pid": PID, "tid": TID},
        {"cat": 3},
        7,
        None,
    ]
    trace = read(tmp_path, [*odd, launch(1, 1), kernel("k", 5, 1, 1)])
    assert (work_names(trace), len(trace.ranges), trace.diagnostics) == (["k"], 0, ())


@pytest.mark.parametrize(
    ("ts", "dur"), [(5, -1), (5, None), (None, 5), ("NaN", 5), (5, "NaN"), (0, 0), ("5", "Infinity")]
)
def test_impossible_work_is_left_out_with_a_diagnostic(tmp_path: Path, ts: object, dur: object) -> None:
    trace = read(tmp_path, [launch(1, 1), kernel("good", 5, 1, 1), kernel("bad", ts, dur, 1)])
    assert work_names(trace) == ["good"]
    (diagnostic,) = trace.diagnostics
    assert diagnostic.severity == "error"
    assert "1 row of kernels with impossible times left out, the first named 'bad'" in diagnostic.text
    cpu = read(tmp_path, [row("cpu_op", "good", 5, 1), row("cpu_op", "bad", ts, dur)])
    assert work_names(cpu) == ["good"]
    assert "CPU operators" in cpu.diagnostics[0].text


def test_names_that_cannot_be_printed_are_made_printable(tmp_path: Path) -> None:
    trace = read(tmp_path, [launch(1, 1), kernel("bad \ud800 name", 5, 1, 1), kernel("", 7, 1, 1)])
    for name in trace.names:
        name.encode()
    assert work_names(trace) == ["bad ? name", "(unnamed)"]


def test_a_trace_is_known_by_its_bytes_and_garbage_collection_stays_on(tmp_path: Path) -> None:
    events = [row("cpu_op", "aten::mm", 1, 2)]
    plain = written(tmp_path, events).read_bytes()
    packed = written(tmp_path, events, "trace.json.gz").read_bytes()
    for content in (plain, packed, b"\xef\xbb\xbf" + plain, json.dumps(events).encode()):
        (tmp_path / "renamed.json").write_bytes(content)
        assert work_names(read_kineto(tmp_path / "renamed.json")) == ["aten::mm"]
    assert gc.isenabled()


WHOLE = json.dumps({"traceEvents": [row("cpu_op", "aten::mm", 1, 2.5), kernel("k", 5, 1.5, 1)]}).encode()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "an empty file"),
        (b" \n", "an empty file"),
        (gzip.compress(b"", mtime=0), "an empty file"),
        (b"SQLite format 3\0" + bytes(100), "not JSON"),
        (b"\x80\x04\x95 pickle", "not JSON"),
        (WHOLE[:-1], "cut off"),
        (WHOLE[:100], "cut off"),
        (WHOLE[: WHOLE.index(b"aten") + 2], "cut off"),
        (gzip.compress(WHOLE, mtime=0)[:-20], "the gzip file is cut off"),
        (gzip.compress(WHOLE, mtime=0)[:40] + b"\0" * 40, "the gzip file is damaged"),
        (WHOLE.replace(b'"cat"', b"cat", 1), "not JSON (character"),
        (b'{"a": 1}', "no list traceEvents"),
        (b'{"traceEvents": {}}', "no list traceEvents"),
        (b'"text"', "no list traceEvents"),
        (b"null", "no list traceEvents"),
        (b"[" * 100_000, "cannot be parsed"),
        (b'{"traceEvents": []}', "holds no operator, kernel or annotation"),
        (b'{"traceEvents": [{"ph": "X", "cat": "toplevel", "ts": 1, "dur": 2}]}', "holds no operator"),
        (b'{"traceEvents": [' + b"9" * 5000 + b"]}", "cannot be parsed"),
    ],
)
def test_bad_input_gets_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(TraceError) as raised:
        read_kineto(path)
    assert says in str(raised.value)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)
    assert gc.isenabled()


def test_a_file_that_cannot_be_opened_gets_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_kineto(tmp_path / "none.json")
    with pytest.raises(TraceError, match="Is a directory"):
        read_kineto(tmp_path)

    def deny(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", deny)  # root may open anything
    with pytest.raises(TraceError, match="Permission denied"):
        read_kineto(tmp_path / "trace.json")


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


def test_an_error_names_its_place_whatever_the_pieces() -> None:
    text = b'[{"a": 1},\n {"b": 2},\n {"c" 3},\n {"d": 4}, {"e": "long enough to go on"}]'
    for piece in (1, 5, 1000):
        with pytest.raises(JsonError, match=r"character 29: Expecting ':' delimiter"):
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
