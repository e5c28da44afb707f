"""The reader: what the formats of the years hold, what bad files get, and files made to hang or fill the memory."""

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
from profkit.snapshot.columns import ALLOC, ALLOCATED, OTHER, PENDING, Annotation
from profkit.snapshot.reader import read_snapshot
from tests.allocator_reference import ReferenceAllocator
from tests.child import run_in_child
from tests.golden import check_text

pytestmark = pytest.mark.usefixtures("rehearsal")


def recorded() -> dict[str, Any]:
    allocator = ReferenceAllocator()
    allocator.record()
    for size in (100, 5 << 20, 700):
        allocator.malloc(size)
    allocator.free(allocator.malloc(3 << 20))
    return allocator.snapshot()


@pytest.fixture
def data() -> dict[str, Any]:
    return recorded()


def written(tmp_path: Path, data: Any, protocol: int = 4) -> Path:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(data, protocol))
    return path


# -- what is there ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_snapshot_is_read_into_columns(tmp_path: Path, data: dict[str, Any], protocol: int) -> None:
    snapshot = read_snapshot(written(tmp_path, data, protocol))
    (device,) = snapshot.devices
    assert len(device.events) == len(data["device_traces"][0])
    assert device.events.size_bytes[device.events.action == ALLOC].tolist() == [100, 5 << 20, 700, 3 << 20]
    assert device.segments.is_large.tolist() == [False, True]
    assert device.blocks.requested_bytes[device.blocks.state == ALLOCATED].tolist() == [100, 700, 5 << 20]
    assert snapshot.settings.is_recorded


def test_a_history_by_torch_2_1_is_refused_and_segments_without_one_are_read(
    tmp_path: Path, data: dict[str, Any]
) -> None:
    del data["allocator_settings"]
    for event in data["device_traces"][0]:
        del event["time_us"]
    for segment in data["segments"]:
        del segment["segment_pool_id"], segment["is_expandable"]
    with pytest.raises(SnapshotError, match=r"a history without times, as torch before 2\.2 wrote it"):
        read_snapshot(written(tmp_path, data))
    assert not read_snapshot(written(tmp_path, data | {"device_traces": []})).settings.is_recorded


def test_unknown_actions_and_unknown_keys_are_ignored(tmp_path: Path, data: dict[str, Any]) -> None:
    data["device_traces"][0].insert(2, {"action": "teleport", "size": 0, "stream": 0, "time_us": 1_000_010, "moon": 1})
    data["workspace_snapshot"] = []
    snapshot = read_snapshot(written(tmp_path, data))
    assert snapshot.devices[0].events.action[2] == OTHER


def test_both_names_of_the_pending_state_are_read(tmp_path: Path, data: dict[str, Any]) -> None:
    data["segments"][0]["blocks"][0]["state"] = "active_pending_free"
    data["segments"][0]["blocks"][1]["state"] = "active_awaiting_free"
    assert read_snapshot(written(tmp_path, data)).devices[0].blocks.state.tolist()[:2] == [PENDING, PENDING]


def test_a_bare_list_of_segments_is_a_snapshot_without_history(tmp_path: Path, data: dict[str, Any]) -> None:
    snapshot = read_snapshot(written(tmp_path, data["segments"]))
    assert len(snapshot.devices[0].events) == 0
    assert len(snapshot.devices[0].blocks) > 0


def test_devices_that_were_not_used_are_left_out(tmp_path: Path, data: dict[str, Any]) -> None:
    data["device_traces"] = [[], *data["device_traces"], []]
    for segment in data["segments"]:
        segment["device"] = 1
    assert [device.index for device in read_snapshot(written(tmp_path, data)).devices] == [1]


def test_annotations_may_nest_and_may_stay_open(tmp_path: Path, data: dict[str, Any]) -> None:
    marks = [("START", "step", 1), ("START", "fwd", 2), ("END", "fwd", 5), ("START", "fwd", 6), ("START", "fwd", 7)]
    marks += [("END", "fwd", 8), ("END", "never began", 9)]
    data["external_annotations"] = [
        {"stage": stage, "name": name, "device": 0, "time_us": time} for stage, name, time in marks
    ]
    assert read_snapshot(written(tmp_path, data)).devices[0].annotations == (
        Annotation("step", 1, None),
        Annotation("fwd", 2, 5),
        Annotation("fwd", 6, None),
        Annotation("fwd", 7, 8),
    )


# -- bad input --------------------------------------------------------------------------------------------------


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("it ran",))


def bad_files(data: dict[str, Any]) -> dict[str, bytes]:
    whole = pickle.dumps(data, 4)
    return {
        "empty file": b"",
        "not a pickle": b"nothing of the sort",
        "cut off": whole[: len(whole) // 2],
        "refused: it names the Python object builtins.print": pickle.dumps({**data, "x": Hostile()}),
        "but not of a memory snapshot": pickle.dumps({"weights": [1, 2]}),
        "no list of segments": pickle.dumps(42),
        "no device was used": pickle.dumps({"segments": [], "device_traces": [[], []]}),
        "a memory snapshot": pickle.dumps({"segments": [{"address": 3}], "device_traces": []}),
        "cut off or damaged": gzip.compress(whole)[:-40],
        # LONG_BINPUT of the dictionary at 1.9 billion
        "too large": b"\x80\x02}r\xff\xff\xff\x6f.",
    }


def test_a_bad_file_is_refused_in_one_line(
    tmp_path: Path, data: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for expected, content in bad_files(data).items():
        path = tmp_path / "bad.pickle"
        path.write_bytes(content)
        with pytest.raises(SnapshotError, match=expected) as caught:
            read_snapshot(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
    assert capsys.readouterr().out == ""


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="no such file"):
        read_snapshot(tmp_path / "absent.pickle")
    with pytest.raises(SnapshotError, match="a directory"):
        read_snapshot(tmp_path)


def test_a_gzip_that_decompresses_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpickler, "MAX_DECOMPRESSED_BYTES", 2**20)
    path = tmp_path / "bomb.pickle.gz"
    path.write_bytes(gzip.compress(pickle.dumps({"segments": b"0" * 2**24})))
    with pytest.raises(SnapshotError, match="decompresses to more than"):
        read_snapshot(path)


def test_reading_restores_the_memory_limit(tmp_path: Path, data: dict[str, Any]) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_AS)
    read_snapshot(written(tmp_path, data))
    assert resource.getrlimit(resource.RLIMIT_AS) == before


CPU_SECONDS = 20
MEMORY_BYTES = 2**31

Change = Callable[[dict[str, Any]], Any]


def nested_list(depth: int = 60) -> list[Any]:
    """Return a list of 2^depth leaves in ``depth`` objects: to print, compare or copy it takes for ever."""
    found: list[Any] = []
    for _ in range(depth):
        found = [found, found]
    return found


def every_event(key: str, value: Any) -> Change:
    def change(data: dict[str, Any]) -> None:
        for event in data["device_traces"][0]:
            event[key] = value

    return change


def at(*path: Any) -> Change:
    """Return the change that puts the last of ``path`` where the others lead."""
    *way, last, value = path

    def change(data: Any) -> None:
        for key in way:
            data = data[key]
        data[last] = value

    return change


NESTED = nested_list()
REFUSED: dict[str, Change] = {
    "segments that overlap": lambda data: data["segments"].append(data["segments"][0]),
    "a block larger than its place": at("segments", 0, "blocks", 0, "size", 1024),
    "a block elsewhere": at("segments", 0, "blocks", 1, "address", 2**41),
    "a state that there is not": at("segments", 0, "blocks", 0, "state", "evaporated"),
    "a negative size": at("device_traces", 0, 1, "size", -1),
    "a huge size": at("device_traces", 0, 1, "size", 2**70),
    "a nested action": at("device_traces", 0, 1, "action", NESTED),
    "a nested size": at("device_traces", 0, 1, "size", NESTED),
    "a size as text": at("device_traces", 0, 1, "size", "100"),
    "a fractional size": at("device_traces", 0, 1, "size", 1.5),
    "an event that is a number": at("device_traces", 0, 1, 7),
    "a nested state": at("segments", 0, "blocks", 0, "state", NESTED),
    "a block that is a list": at("segments", 0, "blocks", 0, NESTED),
    "an address that is a list": at("segments", 0, "address", NESTED),
    "a nested name": at("external_annotations", [{"name": NESTED, "stage": "START", "time_us": 1}]),
    "times that are lists": at(
        "external_annotations", [{"name": name, "stage": "START", "time_us": NESTED} for name in "ab"]
    ),
    "one history as that of a million devices": lambda data: data.update(
        device_traces=data["device_traces"] * 1_000_000
    ),
    "one event a million times": lambda data: data.update(device_traces=[data["device_traces"][0][:1] * 1_000_000]),
    "one block a million times": lambda data: data["segments"][0].update(
        blocks=data["segments"][0]["blocks"][:1] * 1_000_000
    ),
    "segments that share their blocks": lambda data: data["segments"].append({**data["segments"][0], "address": 2**50}),
    "a device number of 4,400 digits": at("segments", 0, "device", 10**4400),
    "a total of 4,400 digits": at("segments", 0, "total_size", 10**4400),
    "a limit of 10^30": at("allocator_settings", "max_split_size", 10**30),
    "a threshold of 10^400": at("allocator_settings", "garbage_collection_threshold", 10**400),
    "a threshold that is no number": at("allocator_settings", "garbage_collection_threshold", float("nan")),
    "divisions with a key of 4,400 digits": at("allocator_settings", "roundup_power2_divisions", {"9" * 4400: 1}),
    "negative divisions": at("allocator_settings", "roundup_power2_divisions", {"1": -4}),
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


def report(path: Path) -> str:
    """Return what ``profkit memory`` shows of a snapshot, from a child that may take so much."""

    def read() -> str:
        try:
            return render(build_memory_document(open_snapshot(path).memory()), "json")
        except SnapshotError as error:
            return f"refused: {error}"

    return run_in_child(read, cpu_seconds=CPU_SECONDS, memory_bytes=MEMORY_BYTES)


def test_a_value_of_the_wrong_kind_is_refused_in_one_line(tmp_path: Path) -> None:
    said = ""
    for name, change in REFUSED.items():
        data = recorded()
        change(data)
        found = report(written(tmp_path, data))
        assert found.startswith(f"refused: {tmp_path}"), name
        assert "\n" not in found
        assert len(found) < 500
        said += f"{name}: {found.replace(str(tmp_path), '').partition(' (int too ')[0]}\n"  # Python's own words
    check_text("refused-snapshots", said)


@pytest.mark.parametrize("name", READ)
def test_an_odd_value_that_counts_for_nothing_is_passed_over(tmp_path: Path, name: str) -> None:
    plain, data = recorded(), recorded()
    READ[name](data)
    found, expected = (report(written(tmp_path, one)) for one in (data, plain))
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
    (tmp_path / "busy.pickle").write_bytes(content)
    assert "more time or memory" in report(tmp_path / "busy.pickle")


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
