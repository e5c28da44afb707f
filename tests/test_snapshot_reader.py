"""The reader: what the formats of the years hold, and what bad files get."""

from __future__ import annotations

import gzip
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profkit.allocator.replay import replay_history
from profkit.errors import SnapshotError
from profkit.snapshot import unpickler
from profkit.snapshot.columns import ALLOC, ALLOCATED, OTHER, PENDING, Annotation
from profkit.snapshot.reader import read_snapshot
from tests.allocator_reference import ReferenceAllocator


def recorded() -> ReferenceAllocator:
    allocator = ReferenceAllocator()
    allocator.record()
    for size in (100, 5 << 20, 700):
        allocator.malloc(size)
    allocator.free(allocator.malloc(3 << 20))
    return allocator


@pytest.fixture
def data() -> dict[str, Any]:
    return recorded().snapshot()


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


def test_a_gzipped_snapshot_is_read(tmp_path: Path, data: dict[str, Any]) -> None:
    path = tmp_path / "snapshot.pickle.gz"
    path.write_bytes(gzip.compress(pickle.dumps(data)))
    assert len(read_snapshot(path).devices[0].events) == len(data["device_traces"][0])


def test_a_snapshot_by_torch_2_1_has_no_times_and_no_settings(tmp_path: Path, data: dict[str, Any]) -> None:
    del data["allocator_settings"]
    for event in data["device_traces"][0]:
        del event["time_us"], event["frames"]
    for segment in data["segments"]:
        del segment["segment_pool_id"], segment["is_expandable"]
        for block in segment["blocks"]:
            del block["address"]
    snapshot = read_snapshot(written(tmp_path, data))
    assert not snapshot.settings.is_recorded
    assert not snapshot.devices[0].events.has_times
    assert snapshot.devices[0].blocks.address.tolist() == sorted(snapshot.devices[0].blocks.address.tolist())


def test_a_snapshot_by_torch_2_0_has_the_requested_size_in_a_history(tmp_path: Path, data: dict[str, Any]) -> None:
    for segment in data["segments"]:
        for block in segment["blocks"]:
            block["history"] = [{"addr": 0, "real_size": block.pop("requested_size"), "frames": []}]
    blocks = read_snapshot(written(tmp_path, data)).devices[0].blocks
    assert blocks.requested_bytes[blocks.state == ALLOCATED].tolist() == [100, 700, 5 << 20]


def test_unknown_actions_are_counted_and_unknown_keys_ignored(tmp_path: Path, data: dict[str, Any]) -> None:
    data["device_traces"][0].insert(2, {"action": "teleport", "size": 0, "stream": 0, "time_us": 1_000_010, "moon": 1})
    data["workspace_snapshot"] = []
    snapshot = read_snapshot(written(tmp_path, data))
    assert snapshot.unknown_actions == {"teleport": 1}
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


def test_a_gzip_that_is_cut_off_is_refused(tmp_path: Path, data: dict[str, Any]) -> None:
    path = tmp_path / "cut.pickle.gz"
    path.write_bytes(gzip.compress(pickle.dumps(data))[:-40])
    with pytest.raises(SnapshotError, match="cut off or damaged"):
        read_snapshot(path)


def test_a_gzip_that_decompresses_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpickler, "MAX_DECOMPRESSED_BYTES", 2**20)
    path = tmp_path / "bomb.pickle.gz"
    path.write_bytes(gzip.compress(pickle.dumps({"segments": b"0" * 2**24})))
    with pytest.raises(SnapshotError, match="decompresses to more than"):
        read_snapshot(path)


def test_a_pickle_that_asks_for_a_memo_of_billions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "memo.pickle"
    path.write_bytes(b"\x80\x02}r\xff\xff\xff\x6f.")  # LONG_BINPUT of the dictionary at 1.9 billion
    with pytest.raises(SnapshotError, match="too large"):
        read_snapshot(path)


def test_reading_restores_the_memory_limit(tmp_path: Path, data: dict[str, Any]) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_AS)
    read_snapshot(written(tmp_path, data))
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.parametrize("change", ["overlap", "gap", "address", "state", "negative", "huge", "text"])
def test_impossible_values_are_refused(tmp_path: Path, data: dict[str, Any], change: str) -> None:
    segment, event = data["segments"][0], data["device_traces"][0][1]
    if change == "overlap":
        data["segments"].append(segment)
    elif change == "gap":
        segment["blocks"][0]["size"] += 512
    elif change == "address":
        segment["blocks"][1]["address"] += 512
    elif change == "state":
        segment["blocks"][0]["state"] = "evaporated"
    else:
        event["size"] = {"negative": -1, "huge": 2**70, "text": "much"}[change]
    with pytest.raises(SnapshotError, match="a memory snapshot"):
        read_snapshot(written(tmp_path, data))


WHOLE = pickle.dumps(recorded().snapshot(), 4)


@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=300, deadline=None)
def test_a_mutated_file_never_crashes_the_reader_or_the_replay(
    tmp_path_factory: pytest.TempPathFactory, flips: list[Any]
) -> None:
    content = bytearray(WHOLE)
    for at, value in flips:
        content[at] = value
    path = tmp_path_factory.mktemp("mutated") / "m.pickle"
    path.write_bytes(content)
    with suppress(SnapshotError):
        snapshot = read_snapshot(path)
        for device in snapshot.devices:
            replay_history(device, snapshot.settings)
