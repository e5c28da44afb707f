"""Categories of allocations, with the evidence for them, and the recorded owners that name them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profkit import read_snapshot
from profkit.analysis.memory import find_capacity
from profkit.analysis.memory.categories import category_of_stack
from profkit.analysis.memory.stacks import StackFacts
from profkit.errors import SnapshotError
from profkit.report.commands.memory import build_memory_document
from profkit.report.document import render
from profkit.run.directory import OWNERS, SNAPSHOT
from tests.allocator_reference import MIB, Block
from tests.captures import capture
from tests.memory_captures import Training, assert_books_close, sizes
from tests.run_builder import start_run


def test_real_training_runs_have_the_expected_categories() -> None:
    """By hand: 128,625,408 fp32 parameters are 514,501,632 B without padding, and AdamW keeps two moments of each."""
    found = sizes(read_snapshot(capture("small.pickle")).memory())
    assert 514_501_632 <= found["parameters"] < 1.05 * 514_501_632
    assert 2 * 514_501_632 <= found["optimizer state"] < 2.1 * 514_501_632
    assert found["workspace"] == 2 * 32 * MIB
    assert found["temporaries"] == 2 * 40 * MIB  # the logits' gradient and the log-softmax's, [4, 256, 10000] each
    rows = read_snapshot(capture("small_forward_cpp_stacks.pickle")).memory().composition.by_category
    assert [row.evidence for row in rows if row.category == "workspace"] == [{"stack": 32 * MIB}]


def test_a_training_step_gets_its_categories_from_stack_and_lifetime() -> None:
    result = Training().memory()
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
    assert evidence["optimizer state"] == {"stack"}
    # `Module.to` moves buffers by the same line as parameters
    assert evidence["parameters"] == evidence["gradients"] == evidence["activations"] == {"lifetime"}


@pytest.mark.parametrize(
    ("metadata", "owner"),
    [
        ("profkit:backward:layers.3", "layers.3"),
        ("profkit:backward:model/layers.3", "layers.3"),
        ("profkit:backward:model/", "model"),
        ("profkit:backward:netD/main.0", "netD/main.0"),
        ("profkit:backward:netD/", "netD"),
        ("mine", "mine"),
        ({"a": "b"}, "a=b"),
    ],
)
def test_metadata_names_the_owner_and_the_category_stays_a_guess(metadata: Any, owner: str) -> None:
    training = Training()
    for event in training.allocator.events:
        if event["action"] == "alloc" and not event["frames"]:
            event["user_metadata"] = metadata
    at = training.memory().composition
    assert [row.evidence for row in at.by_category if row.category == "gradients"] == [{"lifetime": 8 * MIB}]
    assert {row.owner for row in at.largest if row.category == "gradients"} == {owner}


def test_without_phases_an_alloc_without_frames_belongs_to_backward() -> None:
    training = Training()
    training.annotations = [one for one in training.annotations if one["name"].startswith("Optimizer")]
    found = sizes(training.memory())
    assert (found["gradients"], found["activations"]) == (8 * MIB, 12 * MIB)


def backward_pass(training: Training, *sizes: int) -> list[Block]:
    with training.within("backward"):
        return [training.malloc(size, "backward") for size in sizes]


def kept_by_one_line(training: Training, size: int) -> None:
    for step in range(2):
        with training.within(f"step {step + 1}"):
            training.malloc(size, "forward")


def not_in_a_product(training: Training) -> None:
    with training.within("step 1"):
        training.malloc(3000, "data")
        training.malloc(32 * MIB, "forward")


def convolutions(training: Training) -> None:
    """A workspace; cuDNN asks for as many bytes for each convolution, and frees them at once."""
    backward_pass(training, 3000, 32 * MIB)
    for block in backward_pass(training, 32 * MIB, 32 * MIB):
        training.allocator.free(block)


def gradient_anew(training: Training) -> None:
    for _ in range(2):
        training.allocator.free(backward_pass(training, 3000, 32 * MIB)[1])
    backward_pass(training, 3000, 32 * MIB)


@pytest.mark.parametrize(
    ("goes_on", "found"),
    [
        (lambda training: kept_by_one_line(training, MIB), None),
        (lambda training: kept_by_one_line(training, 32 * MIB), None),
        (not_in_a_product, None),
        (convolutions, 32 * MIB),
        (gradient_anew, None),
    ],
)
def test_a_workspace_is_told_from_other_requests_of_its_size(
    goes_on: Callable[[Training], None], found: int | None
) -> None:
    """A library asks for one alone, once, and within a product, whose own memory comes first."""
    training = Training(steps=1)
    goes_on(training)
    assert sizes(training.memory()).get("workspace") == found


@pytest.mark.parametrize(
    ("frame", "category"),
    [
        (("_ddp_init_helper", "torch/nn/parallel/distributed.py", 8), "communication"),
        (("all_gather_into_tensor", "torch/distributed/distributed_c10d.py", 8), "communication"),
        (("foreach_reduce", "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", 8), "communication"),
        (("dispatch", "torch/distributed/tensor/_dispatch.py", 8), None),  # any operation of a DTensor
        (("_pre_forward", "torch/nn/parallel/distributed.py", 8), None),  # copies the inputs
        (("_apply", "torch/nn/modules/module.py", 8), None),  # moves buffers too
        (("trunc_normal_", "torch/nn/init.py", 8), None),  # fills parameters by way of temporaries
    ],
)
def test_a_stack_proves_a_category_only_where_its_lines_allocate_nothing_else(
    frame: tuple[str, str, int], category: str | None
) -> None:
    assert category_of_stack(StackFacts((frame, ("main", "train.py", 3)))) == category


def test_unknown_purposes_are_a_warning_only_where_a_run_could_still_record_them(tmp_path: Path) -> None:
    alone = read_snapshot(capture("oom.pickle")).memory()
    assert "unattributed" in [one.code for one in alone.warnings]
    start_run(tmp_path, status="failed")
    (tmp_path / OWNERS).write_text(json.dumps({"kind": "header", "version": 1}) + "\n")
    (tmp_path / SNAPSHOT).write_bytes(capture("oom.pickle").read_bytes())
    recorded = read_snapshot(tmp_path).memory()
    assert recorded.composition.evidence == alone.composition.evidence
    assert "unattributed" not in [one.code for one in recorded.warnings]


# -- the line that names a stack -------------------------------------------------------------------------------------

PACKAGES = "/x/lib/python3.12/site-packages"
FUNCTIONAL = ("conv2d", f"{PACKAGES}/torch/nn/functional.py", 9)
CALL = ("_call_impl", f"{PACKAGES}/torch/nn/modules/module.py", 1833)
CLOCK = ("__exit__", f"{PACKAGES}/profkit/capture/phase_clock.py", 42)
HOOKS = ("annotated", "/src/profkit/capture/hooks/hooks.py", 364)
RESNET = ("forward", f"{PACKAGES}/torchvision/models/resnet.py", 92)
LLAMA = ("forward", f"{PACKAGES}/transformers/models/llama/modeling_llama.py", 300)
ACCELERATE = ("new_forward", f"{PACKAGES}/accelerate/hooks.py", 170)
GENERATED = ("call", f"/tmp/torchinductor_me/ym/cymh4uh5{'k' * 44}.py", 90)
ADAM = ("_init_group", "torch/optim/adam.py", 7)
TRAIN = ("train", "/src/profkit/models/__main__.py", 54)
THREAD = ("run", "/usr/lib/python3.12/threading.py", 1010)
MINE = ("main", "train.py", 7)


@pytest.mark.parametrize(
    ("frames", "label"),
    [
        ((FUNCTIONAL, CALL, RESNET, CALL, MINE), "resnet.py:92 forward (functional.py:9 conv2d) ← train.py:7 main"),
        (
            (FUNCTIONAL, CALL, ACCELERATE, LLAMA, MINE),
            "modeling_llama.py:300 forward (functional.py:9 conv2d) ← train.py:7 main",
        ),
        ((CLOCK, CALL, MINE), "train.py:7 main (module.py:1833 _call_impl)"),
        ((CLOCK, MINE), "train.py:7 main"),
        ((FUNCTIONAL, ACCELERATE, THREAD), "hooks.py:170 new_forward (functional.py:9 conv2d)"),
        ((FUNCTIONAL, CALL, CLOCK, THREAD), "no line of yours (functional.py:9 conv2d)"),
        ((GENERATED, CALL, RESNET, MINE), "resnet.py:92 forward (compiled code) ← train.py:7 main"),
        ((GENERATED, CALL, THREAD), "no line of yours (compiled code)"),
        ((ADAM, HOOKS, TRAIN), "__main__.py:54 train (adam.py:7 _init_group)"),
        ((), "no Python line (backward pass, or before recording)"),
    ],
)
def test_a_stack_begins_at_the_users_line_or_the_models_file(frames: tuple[Any, ...], label: str) -> None:
    stack = StackFacts(frames)
    assert stack.label == label
    assert not {CLOCK, HOOKS} & {*stack.user}
    assert not any("phase_clock" in frame or "/hooks/" in frame for frame in stack.user_first)


def test_file_names_of_compiled_code_by_the_installed_torch_are_recognised() -> None:
    codecache = pytest.importorskip("torch._inductor.codecache")
    for path in (f"/cache/{codecache.code_hash('call')}.py", "<eval_with_key>.3"):
        assert StackFacts((("call", path, 90), ("forward", "train.py", 12))).user == (("forward", "train.py", 12),)


def test_all_lines_of_compiled_code_are_one_row_under_the_line_that_called_it() -> None:
    training = Training(steps=1)
    training.malloc(30 * MIB, "generated")
    training.malloc(40 * MIB, "generated anew")
    (row,) = [row for row in training.memory().composition.by_stack if "compiled" in row.label]
    assert (row.bytes, row.count, row.label) == (70 * MIB, 2, "train.py:12 forward (compiled code)")
    training = Training(steps=1)
    with training.within("step 1", "backward"):
        training.malloc(32 * MIB, "generated")
    training.step(2, False)
    result = training.memory()
    assert sizes(result)["workspace"] == 32 * MIB
    labels = [row.label for row in result.composition.by_stack if row.bytes == 32 * MIB]
    assert labels == ["train.py:12 forward (compiled code)"]


def test_lines_that_fx_recorded_name_the_stack_of_its_code() -> None:
    """``_snapshot(augment_with_fx_traces=True)`` puts them into the frame of the generated code."""
    training = Training(steps=1)
    trace = '  File "net.py", line 4, in forward\n    b(x)\n  File "net.py", line 9, in relu\n'
    for line in (8, 9):
        training.malloc(40 * MIB, "mask")
        training.allocator.events[-1]["frames"] = [
            {"name": "forward", "filename": "/tmp/fx_generated_abc.py", "line": line, "fx_original_trace": trace},
            {"name": "__call__", "filename": "/x/site-packages/torch/fx/graph_module.py", "line": 3},
            {"name": "main", "filename": "train.py", "line": 7},
        ]
    rows = {row.label: row.count for row in training.memory().composition.by_stack}
    assert rows["net.py:9 relu (compiled code) ← net.py:4 forward ← train.py:7 main"] == 2


# -- recorded owners -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "dump", "agrees", "is_from_before"),
    [(777, None, True, False), (512, 512, True, True), (-512, -512, False, True)],
)
def test_a_peak_from_before_the_recording_proves_only_that_none_was_higher(
    monkeypatch: pytest.MonkeyPatch, start: int, dump: int | None, agrees: bool, is_from_before: bool
) -> None:
    """Of the first the peak at the start is known; those of the others are off the true one by so much, then as now."""
    training = Training()
    training.allocator.max_entries = 60
    training.step(3, False)
    figures = training.figures()
    figures["allocated_peak_bytes"] += dump or 0
    earlier = start if dump is None else figures["allocated_peak_bytes"]
    training.ledger.append({**figures, "moment": "start", "allocated_peak_bytes": earlier})
    monkeypatch.setattr(training, "figures", lambda: figures)
    opened = training.opened_run()
    result, check = opened.memory(), opened.memory().allocator_check
    assert (check.agrees, check.is_from_before, check.earlier_peak_bytes) == (agrees, is_from_before, earlier)
    assert ("ledger-disagrees" in {finding.code for finding in result.warnings}) == (not agrees)
    shown = render(build_memory_document(result), "table")
    assert ("agree to the byte" in shown) == (not is_from_before)
    assert ("Before recording began PyTorch's own peak was 777 B" in shown) == (not is_from_before)
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
def test_a_damaged_file_of_owners_is_refused(tmp_path: Path, line: str, says: str) -> None:
    run = Training().write_run(tmp_path)
    (run / OWNERS).write_text(f'{line}\n{{"kind": "later"}}\n')
    with pytest.raises(SnapshotError, match=says):
        read_snapshot(run)


def test_a_file_of_owners_cut_off_in_its_last_line_is_read(tmp_path: Path) -> None:
    run = Training().write_run(tmp_path)
    (run / OWNERS).write_text((run / OWNERS).read_text()[:-30])
    assert read_snapshot(run).memory().allocator_check is None


def test_peaks_and_tensors_that_the_snapshot_does_not_have_fail_the_account(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    figures = training.figures()
    figures["allocated_peak_bytes"] += 512
    monkeypatch.setattr(training, "figures", lambda: figures)
    # A tensor without bytes has no allocation, and none is missing.
    training.ledger += [{**training.ledger[1], "address": 5}, {**training.ledger[1], "address": 0, "bytes": 0}]
    training.ledger.append({"kind": "unread", "time_us": 5, "step": 0, "saved_tensors": 3})
    result = training.opened_run().memory()
    assert result.allocator_check.allocated_difference_bytes == -512
    assert result.allocator_check.unmatched_entries == 1
    assert {"ledger-disagrees", "ledger-unmatched"} <= {warning.code for warning in result.warnings}
    assert "3 tensors kept for backward could not be found" in render(build_memory_document(result), "table")
    assert result.to_dict()["ledger"]["unread_saved_tensors"] == 3


def test_a_storage_of_several_tensors_bears_the_names_of_the_first_and_the_last() -> None:
    training = Training(steps=1)
    names = ["conv1.weight", *(f"layer{n}.conv.weight" for n in range(60)), "fc.bias"]
    gradient = next(line for line in training.ledger if line.get("role") == "gradient")
    training.ledger.remove(gradient)
    training.ledger += [{**gradient, "name": name} for name in names]
    owners = {row.owner for row in training.at_peak().largest}
    assert "gradient bucket: conv1.weight … fc.bias (62 gradients)" in owners
    assert "conv1.weight" not in owners


def test_tied_weights_are_named_both_and_a_gradient_noted_at_every_step_once() -> None:
    training = Training(steps=1)
    tied = next(line for line in training.ledger if line.get("role") == "parameter")
    training.ledger += [{**tied, "name": "head.weight"}, {**tied, "name": "head.weight", "step": 1}]
    training.ledger += [{**line, "step": 1} for line in training.ledger if line.get("role") == "gradient"]
    owners = {row.owner for row in training.at_peak().largest}
    assert {"shared storage: w0, head.weight (2 parameters)", "w1"} <= owners
    assert not any("gradient" in (owner or "") for owner in owners)


def test_a_tensor_that_several_modules_saved_is_one_activation() -> None:
    training = Training(steps=1)
    training.malloc(50 * MIB, "forward", ("saved", ""))
    training.ledger += [{**training.ledger[-1], "name": name} for name in ("h.0.ln", "h.0.attn")]
    largest = training.at_peak().largest[0]
    assert (largest.category, largest.owner) == ("activations", "h.0.ln")
