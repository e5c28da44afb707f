"""Snapshots made to hang, to fill the memory or to be misread: each gets its one line, or is read as usual."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profkit import files
from profkit.errors import SnapshotError
from profkit.reading import open_snapshot
from profkit.report.commands.memory import build_memory_document
from profkit.report.document import render
from profkit.snapshot import unpickler
from tests.allocator_reference import ReferenceAllocator
from tests.child import run_in_child

CPU_SECONDS = 20
MEMORY_BYTES = 2**31

Change = Callable[[dict[str, Any]], Any]


def nested_list(depth: int = 60) -> list[Any]:
    """Return a list of 2^depth leaves in ``depth`` objects: to print, compare or copy it takes for ever."""
    found: list[Any] = []
    for _ in range(depth):
        found = [found, found]
    return found


def recorded() -> dict[str, Any]:
    allocator = ReferenceAllocator()
    allocator.record()
    for size in (100, 5 << 20, 700):
        allocator.malloc(size)
    allocator.free(allocator.malloc(3 << 20))
    return allocator.snapshot()


def every_event(key: str, value: Any) -> Change:
    def change(data: dict[str, Any]) -> None:
        for event in data["device_traces"][0]:
            event[key] = value

    return change


def setting(key: str, value: Any) -> Change:
    return lambda data: data["allocator_settings"].__setitem__(key, value)


def at(*path: Any) -> Change:
    """Return the change that puts the last of ``path`` where the others lead."""
    *way, last, value = path

    def change(data: Any) -> None:
        for key in way:
            data = data[key]
        data[last] = value

    return change


NESTED = nested_list()
REFUSED: dict[str, tuple[Change, str]] = {
    "a nested action": (at("device_traces", 0, 1, "action", NESTED), "action is no text"),
    "a nested size": (at("device_traces", 0, 1, "size", NESTED), "size is no integer"),
    "a size as text": (at("device_traces", 0, 1, "size", "100"), "size is no integer"),
    "a fractional size": (at("device_traces", 0, 1, "size", 1.5), "size is no integer"),
    "an event that is a number": (at("device_traces", 0, 1, 7), "a history is no list of records"),
    "a nested state": (at("segments", 0, "blocks", 0, "state", NESTED), "unknown state"),
    "a block that is a list": (at("segments", 0, "blocks", 0, NESTED), "blocks is no list of records"),
    "an address that is a list": (at("segments", 0, "address", NESTED), "address is no integer"),
    "a nested name": (
        at("external_annotations", [{"name": NESTED, "stage": "START", "time_us": 1}]),
        "the name of an annotation is no text",
    ),
    "times that are lists": (
        at("external_annotations", [{"name": name, "stage": "START", "time_us": NESTED} for name in "ab"]),
        "time_us is no integer",
    ),
    "one history as that of a million devices": (
        lambda data: data.__setitem__("device_traces", data["device_traces"] * 1_000_000),
        "two histories are one and the same",
    ),
    "one event a million times": (
        lambda data: data["device_traces"].__setitem__(0, data["device_traces"][0][:1] * 1_000_000),
        "two records of a history are one and the same",
    ),
    "one block a million times": (
        lambda data: data["segments"][0].__setitem__("blocks", data["segments"][0]["blocks"][:1] * 1_000_000),
        "two records of blocks are one and the same",
    ),
    "segments that share their blocks": (
        lambda data: data["segments"].append({**data["segments"][0], "address": 2**50}),
        "two lists of blocks are one and the same",
    ),
    "a device number of 4,400 digits": (at("segments", 0, "device", 10**4400), "an impossible device"),
    "a total of 4,400 digits": (at("segments", 0, "total_size", 10**4400), "do not tile it"),
    "a limit of 10^30": (setting("max_split_size", 10**30), "an impossible max_split_size"),
    "a threshold of 10^400": (setting("garbage_collection_threshold", 10**400), "a memory snapshot"),
    "a threshold that is no number": (setting("garbage_collection_threshold", float("nan")), "is no number"),
    "divisions with a key of 4,400 digits": (setting("roundup_power2_divisions", {"9" * 4400: 1}), "divisions"),
    "negative divisions": (setting("roundup_power2_divisions", {"1": -4}), "divisions"),
}

READ: dict[str, Change] = {
    "nested metadata": every_event("user_metadata", {"a": NESTED, "b": "x"}),
    "nested frames": every_event("frames", [{"name": NESTED, "filename": NESTED, "line": NESTED}]),
    "frames that are text": every_event("frames", "abc"),
    "a line number of 4,400 digits": every_event("frames", [{"name": "f", "filename": "x.py", "line": 10**4400}]),
    "a million frames": every_event("frames", [{"name": "f", "filename": "x.py", "line": 1}] * 1_000_000),
    "a million devices without a history": lambda data: data["device_traces"].extend([[]] * 1_000_000),
    "settings that are text": at("allocator_settings", "none"),
}


def written(tmp_path: Path, content: bytes, name: str = "snapshot.pickle") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def report(path: Path) -> str:
    """Return what ``profkit memory`` shows of a snapshot, from a child that may take so much."""

    def read() -> str:
        try:
            return render(build_memory_document(open_snapshot(path).memory()), "json")
        except SnapshotError as error:
            return f"refused: {error}"

    return run_in_child(read, cpu_seconds=CPU_SECONDS, memory_bytes=MEMORY_BYTES)


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_of_the_wrong_kind_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    change, expected = REFUSED[name]
    data = recorded()
    change(data)
    found = report(written(tmp_path, pickle.dumps(data, 4)))
    assert found.startswith("refused: ")
    assert expected in found
    assert "\n" not in found
    assert len(found) < 500


@pytest.mark.parametrize("name", READ)
def test_an_odd_value_that_counts_for_nothing_is_passed_over(tmp_path: Path, name: str) -> None:
    plain, data = recorded(), recorded()
    READ[name](data)
    found, expected = (report(written(tmp_path, pickle.dumps(one, 4))) for one in (data, plain))
    assert not found.startswith("refused")
    assert '"peak_bytes"' in found
    assert expected.split('"peak_bytes": ')[1].split(",")[0] == found.split('"peak_bytes": ')[1].split(",")[0]


def nested_key() -> bytes:
    """A dictionary with one key, a tuple of 2^60 leaves: to hash it takes for ever."""
    pairs = b"".join(bytes([0x68, i, 0x68, i, 0x86, 0x94]) for i in range(60))  # (get, get) as tuple, remembered
    return b"\x80\x04}()\x94" + pairs + b"K\x01u."


def keys_of_one_hash(count: int) -> bytes:
    """A dictionary whose keys are multiples of 2^61 - 1, which all hash to 0."""
    keys = (b"\x8a\x0a" + (k * (2**61 - 1)).to_bytes(10, "little") + b"K\x00" for k in range(1, count))
    return b"\x80\x04}(" + b"".join(keys) + b"u."


@pytest.mark.parametrize("content", [nested_key(), keys_of_one_hash(150_000)], ids=["a nested key", "keys of one hash"])
def test_a_pickle_that_keeps_the_unpickler_busy_for_years_is_refused(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpickler, "_REHEARSAL_CPU_SECONDS", 1)
    assert "more time or memory" in report(written(tmp_path, content))


def test_a_gzip_is_stopped_while_it_is_inflated(tmp_path: Path) -> None:
    length = 3 * 2**30
    path = tmp_path / "text.pickle.gz"
    with gzip.open(path, "wb", 1) as file:
        file.write(b"\x80\x04\x8d" + length.to_bytes(8, "little"))  # one text of 3 GiB
        for _ in range(16):
            file.write(b"x" * 2**20)
    assert "too large" in report(path)


def test_what_hides_in_a_gzip_cannot_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LEAST_MEMORY_BYTES", 2**27)
    path = tmp_path / "lists.pickle.gz"
    with gzip.open(path, "wb", 1) as file:
        file.write(b"\x80\x04](")
        for _ in range(16):
            file.write(b"}" * 2**20)  # 16 million dictionaries in 70 kB: 1.1 GB
        file.write(b"e.")
    assert "too large" in report(path)


def test_a_pickle_cut_within_a_bytearray_gets_no_line_but_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cut.pickle"
    path.write_bytes(pickle.dumps({"x": bytearray(300)}, 5)[:200])
    with pytest.raises(SnapshotError, match="cut off"):
        open_snapshot(path)
    assert capfd.readouterr() == ("", "")
