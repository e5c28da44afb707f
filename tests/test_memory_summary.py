"""The account of a snapshot: books that close, categories with their evidence, phases, leaks, what it warns of."""

from __future__ import annotations

import json
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profkit import read_snapshot
from profkit.analysis.memory.bins import bin_history
from profkit.analysis.memory.opened_snapshot import OpenedSnapshot
from profkit.analysis.memory.owners import find_capacity
from profkit.analysis.memory.result import MemoryResult
from profkit.analysis.memory.stacks import StackFacts
from profkit.errors import SnapshotError, UsageError
from profkit.report.document import render
from profkit.report.memory import build_memory_document
from profkit.run.directory import OWNERS
from profkit.snapshot.reader import build_snapshot
from tests.allocator_reference import MIB, ReferenceAllocator
from tests.captures import capture
from tests.memory_captures import Training


@pytest.fixture
def opened(tmp_path: Path) -> OpenedSnapshot:
    return read_snapshot(Training().write(tmp_path))


def sizes(result: MemoryResult) -> dict[str, int]:
    return {row.category: row.bytes for row in result.composition.by_category}


def assert_books_close(result: MemoryResult) -> None:
    at = result.composition
    assert sum(row.bytes for row in at.by_category) == at.allocated_bytes
    assert sum(row.bytes for row in at.by_stack) == at.allocated_bytes
    assert sum(row.count for row in at.by_stack) == sum(row.count for row in at.by_category)
    for row in at.by_category:
        assert sum(row.evidence.values()) in (row.bytes, 0)


@pytest.mark.parametrize(
    "name", ["small.pickle", "small_forward_cpp_stacks.pickle", "expandable.pickle", "midrun.pickle", "oom.pickle"]
)
def test_the_books_of_real_snapshots_close(name: str) -> None:
    opened = read_snapshot(capture(name))
    result = opened.memory()
    assert result.composition.allocated_bytes == result.totals.allocated_peak_bytes
    assert_books_close(result)
    assert_books_close(opened.memory(stack="probe", min_bytes=MIB))
    for phase in result.phases:
        at = opened.memory(at=f"phase:{phase.name}").composition
        assert at.allocated_bytes == phase.peak_bytes
        assert at.phase == phase.name


def test_a_real_training_run_by_category() -> None:
    """By hand: 128,625,408 fp32 parameters are 514,501,632 B without padding, and AdamW keeps two moments of each."""
    found = sizes(read_snapshot(capture("small.pickle")).memory())
    assert 514_501_632 <= found["parameters"] < 1.05 * 514_501_632
    assert 2 * 514_501_632 <= found["optimizer state"] < 2.1 * 514_501_632
    assert found["workspace"] == 2 * 32 * MIB
    assert found["temporaries"] == 2 * 40 * MIB  # the logits' gradient and the log-softmax's, [4, 256, 10000] each


def test_native_stacks_tell_the_workspace() -> None:
    rows = read_snapshot(capture("small_forward_cpp_stacks.pickle")).memory().composition.by_category
    (workspace,) = [row for row in rows if row.category == "workspace"]
    assert workspace.evidence == {"stack": 32 * MIB}


def test_what_compiled_code_asks_for_is_not_the_users_own_doing(tmp_path: Path) -> None:
    training = Training(steps=1)
    training.mark("START", "step 1")
    training.mark("START", "backward")
    training.malloc(32 * MIB, "generated")
    training.mark("END", "backward")
    training.mark("END", "step 1")
    training.step(2, False)
    result = read_snapshot(training.write(tmp_path)).memory()
    assert sizes(result)["workspace"] == 32 * MIB
    (row,) = [row for row in result.composition.by_stack if row.bytes == 32 * MIB]
    assert row.label == "train.py:12 forward (cymh4uh5….py:90 call)"


def test_a_frame_of_profkits_own_hooks_is_never_the_users_line() -> None:
    stack = StackFacts((("_init_group", "torch/optim/adam.py", 7), ("annotated", "/src/profkit/capture/hooks.py", 364)))
    assert stack.user == ()
    stack = StackFacts((*stack.frames, ("train", "/src/profkit/models/__main__.py", 54)))
    assert stack.label == "__main__.py:54 train (adam.py:7 _init_group)"


def test_what_this_torch_calls_the_files_of_compiled_code_is_known() -> None:
    codecache = pytest.importorskip("torch._inductor.codecache")
    for path in (f"/cache/{codecache.code_hash('call')}.py", "<eval_with_key>.3"):
        assert StackFacts((("call", path, 90), ("forward", "train.py", 12))).user == (("forward", "train.py", 12),)


def test_categories_by_stack_and_lifetime(opened: OpenedSnapshot) -> None:
    result = opened.memory()
    assert_books_close(result)
    assert result.composition.phase == "backward"
    assert sizes(result) == {
        "activations": 12 * MIB,
        "optimizer state": 16 * MIB,
        "parameters": 8 * MIB,
        "gradients": 8 * MIB,
        "temporaries": 4 * MIB,  # 3 MiB, in a gap of 4 that leaves too little to split off
        "inputs": 3072,
    }
    evidence = {row.category: set(row.evidence) for row in result.composition.by_category}
    assert evidence["optimizer state"] == evidence["parameters"] == {"stack"}
    assert evidence["gradients"] == evidence["activations"] == {"lifetime"}


def test_a_ledger_names_owners_and_is_checked_against(tmp_path: Path) -> None:
    result = read_snapshot(Training().write_run(tmp_path)).memory()
    rows = {row.category: row for row in result.composition.by_category}
    assert set(rows["parameters"].evidence) == set(rows["gradients"].evidence) == {"identity"}
    owners = {row.owner for row in read_snapshot(tmp_path).memory(stack="w1").composition.largest}
    assert owners == {"w1"}
    assert result.allocator_check is not None
    assert result.allocator_check.agrees
    assert result.allocator_check.unmatched_entries == 0


def test_a_ledger_quotes_the_time_before_and_the_capacity(tmp_path: Path) -> None:
    training = Training()
    training.allocator.max_entries = 60
    training.step(3, False)
    training.ledger.append({**training.figures(), "moment": "start", "allocated_peak_bytes": 777})
    opened = read_snapshot(training.write_run(tmp_path))
    check = opened.memory().allocator_check
    assert check is not None
    assert check.agrees
    assert check.earlier_peak_bytes == 777
    shown = render(build_memory_document(opened.memory()), "table")
    assert "Before recording began PyTorch's own peak was 777 B" in shown
    assert find_capacity(opened.device().recorded, 0) == 2**34


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"kind": "header", "version": 99}', "newer profkit"),
        ('{"kind": "owned"}', ":1: not a line"),
        ("[1]", ":1: not a line"),
        ("nonsense", ":1: not a line"),
    ],
)
def test_a_damaged_ledger_is_refused(tmp_path: Path, line: str, says: str) -> None:
    run = Training().write_run(tmp_path)
    (run / OWNERS).write_text(f'{line}\n{{"kind": "later"}}\n')
    with pytest.raises(SnapshotError, match=says):
        read_snapshot(run)


def test_a_ledger_cut_off_in_its_last_line_is_read(tmp_path: Path) -> None:
    run = Training().write_run(tmp_path)
    (run / OWNERS).write_text((run / OWNERS).read_text()[:-30])
    assert read_snapshot(run).memory().allocator_check is None


def test_of_nested_phases_the_outermost_counts(tmp_path: Path) -> None:
    training = Training(steps=0)
    training.mark("START", "opt")
    training.step(0, False)
    training.mark("END", "opt")
    (phase,) = read_snapshot(training.write(tmp_path)).memory().phases
    assert (phase.name, phase.instances) == ("optimizer", 1)


def test_a_ledger_that_disagrees_is_said(tmp_path: Path) -> None:
    run = Training().write_run(tmp_path)
    lines = (run / OWNERS).read_text().splitlines()
    figures = json.loads(lines[-1])
    figures["allocated_peak_bytes"] += 512
    stray = {**json.loads(lines[1]), "address": 5}
    (run / OWNERS).write_text("\n".join([*lines[:-1], json.dumps(stray), json.dumps(figures)]))
    result = read_snapshot(run).memory()
    assert result.allocator_check is not None
    assert result.allocator_check.allocated_difference_bytes == -512
    assert {"ledger-disagrees", "ledger-unmatched"} <= {warning.code for warning in result.warnings}


@pytest.mark.parametrize(
    ("metadata", "owner"), [("profkit:backward:layers.3", "layers.3"), ("mine", "mine"), ({"a": "b"}, "a=b")]
)
def test_metadata_names_the_owner(tmp_path: Path, metadata: Any, owner: str) -> None:
    training = Training()
    for event in training.allocator.events:
        if event["action"] == "alloc" and not event["frames"]:
            event["user_metadata"] = metadata
    result = read_snapshot(training.write(tmp_path)).memory()
    rows = {row.category: row for row in result.composition.by_category}
    assert rows["gradients"].evidence == {"metadata": 8 * MIB}
    assert {row.owner for row in result.composition.largest if row.category == "gradients"} == {owner}


def test_without_phases_the_autograd_thread_is_told_by_its_missing_frames(tmp_path: Path) -> None:
    training = Training()
    training.annotations = [one for one in training.annotations if one["name"].startswith("Optimizer")]
    found = sizes(read_snapshot(training.write(tmp_path)).memory())
    assert found["gradients"] == 8 * MIB
    assert found["activations"] == 12 * MIB


def test_filters_keep_the_books(opened: OpenedSnapshot) -> None:
    result = opened.memory(stack="adam.py", min_bytes=MIB)
    assert sizes(result) == {"optimizer state": 16 * MIB, "(not selected)": 32 * MIB + 3072}
    assert_books_close(result)
    assert [row.bytes for row in result.composition.largest] == [4 * MIB] * 4


def test_moments(opened: OpenedSnapshot) -> None:
    forward = opened.memory(at="phase:forward").composition
    assert forward.phase == "forward"
    assert {row.category for row in forward.by_category} >= {"parameters", "activations", "temporaries"}
    first = int(opened.device().timeline.times_us[0])
    assert opened.memory(at="0us").composition.moment == 1
    assert opened.memory(at=str(first)).composition.moment == 1
    assert opened.memory(at="0.014ms").composition.moment == 3
    for wrong in ("phase:nothing", "noon", "500s"):
        with pytest.raises(UsageError, match=r"^(no phase|moment)"):
            opened.memory(at=wrong)


def test_named_phases_come_first(tmp_path: Path) -> None:
    training = Training()
    training.mark("START", "epoch 1")
    training.malloc(700, "keep")
    training.mark("END", "epoch 1")
    result = read_snapshot(training.write(tmp_path), phases={"tail": "epoch *"}).memory(at="phase:tail")
    assert [phase.name for phase in result.phases] == ["forward", "backward", "optimizer", "tail"]


def test_devices(tmp_path: Path) -> None:
    data, other = Training().snapshot(), Training(scale=2).snapshot()
    for segment in other["segments"]:
        segment["device"] = 1
    data["segments"] += other["segments"]
    data["device_traces"] += other["device_traces"]
    (tmp_path / "two.pickle").write_bytes(pickle.dumps(data))
    opened = read_snapshot(tmp_path / "two.pickle")
    assert opened.memory().totals.device == 1
    assert [totals.device for totals in opened.memory().others] == [0]
    assert opened.memory(device=0).totals.allocated_peak_bytes == Training().allocator.peaks()[0]
    with pytest.raises(UsageError, match="device 7"):
        opened.memory(device=7)


def test_leaks_are_told_from_state_made_on_first_use(tmp_path: Path) -> None:
    clean, leaking = Training(), Training(leaks=True, steps=4)
    assert not read_snapshot(clean.write(tmp_path)).memory().leaks.suspects
    result = read_snapshot(leaking.write(tmp_path)).memory()
    assert [(one.step, one.began_in) for one in result.leaks.steps] == [
        ("step 1", "step 0"),
        ("step 2", "step 1"),
        ("step 3", "step 2"),
    ]
    assert result.leaks.steps[0].bytes == 1024 + 16 * MIB  # AdamW's moments began in step 0 too
    assert [(row.bytes, row.label) for row in result.leaks.suspects] == [
        (1024, "train.py:30 remember ← train.py:45 <module>")
    ]
    assert "leak" in {warning.code for warning in result.warnings}


def test_no_history_leads_the_warnings(tmp_path: Path) -> None:
    data = Training().snapshot()
    data["device_traces"] = []
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(data))
    result = read_snapshot(tmp_path / "s.pickle").memory()
    assert result.warnings[0].code == "no-history"
    assert not result.totals.exact
    assert result.totals.bounds == (24 * MIB, None)
    assert result.composition.allocated_bytes == 24 * MIB
    assert_books_close(result)
    with pytest.raises(SnapshotError, match="no times"):
        read_snapshot(tmp_path / "s.pickle").memory(at="1s")


def test_an_impossible_sequence_is_counted_and_no_peak_is_called_exact(tmp_path: Path) -> None:
    training = Training()
    training.allocator.events.insert(
        4,
        {
            "action": "free_requested",
            "addr": 77,
            "size": 5,
            "stream": 0,
            "time_us": training.allocator.events[3]["time_us"],
            "frames": [],
        },
    )
    result = read_snapshot(training.write(tmp_path)).memory()
    assert not result.totals.exact
    low, high = result.totals.bounds or (0, 0)
    assert low <= Training().allocator.peaks()[0] <= (high or 0)
    assert result.warnings[0].code == "contradiction"
    assert_books_close(result)


def test_old_snapshots_without_times_and_settings(tmp_path: Path) -> None:
    data = Training().snapshot()
    del data["allocator_settings"], data["external_annotations"]
    for event in data["device_traces"][0]:
        del event["time_us"]
    (tmp_path / "old.pickle").write_bytes(pickle.dumps(data))
    result = read_snapshot(tmp_path / "old.pickle").memory()
    assert result.totals.allocated_peak_bytes == Training().allocator.peaks()[0]
    assert result.totals.peak_time_us is None
    assert {"no-settings", "no-times"} <= {warning.code for warning in result.warnings}


def test_old_snapshots_of_other_settings_are_found_out(tmp_path: Path) -> None:
    allocator = ReferenceAllocator(divisions=4)
    allocator.record()
    allocator.free(allocator.malloc(33 * MIB))
    data = allocator.snapshot()
    del data["allocator_settings"]
    (tmp_path / "old.pickle").write_bytes(pickle.dumps(data))
    assert not read_snapshot(tmp_path / "old.pickle").memory().totals.exact


def test_the_json_is_the_contract(opened: OpenedSnapshot) -> None:
    data = json.loads(json.dumps(opened.memory().to_dict()))
    assert {
        "snapshot",
        "device",
        "allocated",
        "reserved",
        "requested",
        "exact",
        "bounds",
        "history",
        "peak",
        "phases",
        "fragmentation",
        "oom",
        "devices",
        "warnings",
    } <= set(data)
    assert set(data["allocated"]) == {"peak_bytes", "peak_time_us", "end_bytes"}
    assert set(data["reserved"]) == {"peak_bytes", "end_bytes"}
    assert {"complete", "events", "reason"} <= set(data["history"])
    assert set(data["peak"]["by_category"][0]) >= {"category", "bytes", "share", "evidence"}
    assert set(data["peak"]["by_stack"][0]) == {"bytes", "share", "count", "stack"}
    assert set(data["peak"]["largest"][0]) >= {"bytes", "requested_bytes", "phase", "owner", "stack"}
    assert sum(row["bytes"] for row in data["peak"]["by_stack"]) == data["allocated"]["peak_bytes"]
    assert data["peak"]["by_stack"][0]["stack"][0].startswith("train.py")  # the user's own lines first


JUNK = st.sampled_from([None, -1, 7, 2**40, "x", [], ["x"], [{}], {}, (1,), 1.5, True])


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), JUNK), min_size=1, max_size=4))
@settings(max_examples=250, deadline=None)
def test_no_damaged_value_ends_in_a_traceback(damages: list[Any]) -> None:
    """Every value of a snapshot may be anything: it is read, or refused in one line."""
    data = Training().snapshot()
    places: list[tuple[Any, Any]] = []
    todo: list[Any] = [data]
    while todo:
        holder = todo.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        places += [(holder, key) for key in keys]
        todo += [holder[key] for key in keys if isinstance(holder[key], dict | list)]
    for place, _, junk in damages:
        holder, key = places[place % len(places)]
        holder[key] = junk
    with suppress(SnapshotError):
        opened = OpenedSnapshot(build_snapshot(Path("damaged.pickle"), pickle.loads(pickle.dumps(data))))
        opened.memory()
        for device in opened.devices.values():
            bin_history(device)
