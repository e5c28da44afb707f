"""Memory of a model: cells, a recording read back, what a block saves, the report, and every allocation of a step."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections import Counter
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from profkit.errors import UsageError
from profkit.models import PRESETS, Preset
from profkit.models.transformer import TransformerLM
from recipes.memory_questions import main, predict
from recipes.model_memory import measure
from recipes.model_memory.cells import GRIDS, build_cells, name_of, work_of
from recipes.model_memory.measure import Part, compare_phases, count_saved, group_parts, measure_cell, read_recorded
from recipes.model_memory.predict import StepAccount, describe_prediction, predict_memory
from recipes.model_memory.report import add_columns, phase_of, report
from recipes.whole_model import training
from recipes.whole_model.cells import Work
from tests.conftest import ROOT

TRACE = ROOT / "traces" / "small-train.snapshot.pickle.gz"
SMALL = Work("small", 256)
"""What TRACE recorded, on an H200."""
BATCH, CONTEXT = 2, 24
GIB = 2**30


def _cell(**changed: Any) -> dict[str, Any]:
    setting = {"size": "tiny", "context": 48, "passes": "train", "dtype": "fp32", "checkpoint_layers": 0, "batch": 2}
    return {**setting, **changed}


def test_no_checkpoint_has_more_layers_than_the_model() -> None:
    cells = build_cells({**GRIDS["reports"], "size": ("tiny", "small"), "checkpoint_layers": (0, 1, 2, 12, 13)}, 4)
    layers = {size: {cell["checkpoint_layers"] for cell in cells if cell["size"] == size} for size in ("tiny", "small")}
    assert layers == {"tiny": {0, 1, 2}, "small": {0, 1, 2, 12}}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Let `profkit run` leave a real recording of the small model, and return the commands that were run."""
    commands: list[list[str]] = []

    def profkit(*words: str) -> None:
        commands.append(list(words))
        if words[0] == "run":
            run = Path(words[words.index("-o") + 1])
            run.mkdir(parents=True)
            shutil.copy(TRACE, run / "snapshot.pickle.gz")
            Path(json.loads(words[-1])["result"]).write_text("null")
        else:
            Path(words[-1]).write_bytes(b"PNG")

    monkeypatch.setattr(measure, "_profkit", profkit)
    monkeypatch.setattr(measure, "read_recorded", lambda run, work: read_recorded(run / "snapshot.pickle.gz", work))
    monkeypatch.setattr(measure, "_count", lambda _training: {"saved_bytes": 7})
    return commands


def test_a_recorded_cell_has_the_predicted_peaks_to_the_byte(recorded: list[list[str]], tmp_path: Path) -> None:
    cell = _cell(size="small", context=256, batch=4)
    row: dict[str, Any] = measure_cell(cell, "cuda", {name_of(cell): tmp_path / "timeline.png"})
    assert (row["status"], row["saved_bytes"], row["timeline"]) == ("ok", 7, "timeline.png")
    assert row["requested_peak_bytes"] == predict_memory(SMALL).peak.bytes
    assert [phase["difference_bytes"] for phase in row["requested_phases"]] == [0, 0, 0, 0]
    assert (row["requested_phase"], row["difference_bytes"]) == ("backward", 0)
    run, memory = recorded
    assert run[:2] == ["run", "--memory-only"]
    assert Work(
        **{key: value for key, value in json.loads(run[-1]).items() if key not in ("device", "steps", "result")}
    )
    assert memory[-2:] == ["--timeline", str(tmp_path / "timeline.png")]


def test_a_recorded_step_that_runs_out_of_memory_names_the_phase(
    recorded: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    del recorded
    shortage = {"phase": "backward", "requested_bytes": 2 << 30, "free_bytes": 1}
    monkeypatch.setattr(measure, "_profkit", lambda *words: Path(json.loads(words[-1])["result"]).write_text(
        json.dumps(shortage)))  # fmt: skip
    row = measure_cell(_cell(), "cuda", {})
    assert (row["status"], row["requested_bytes"]) == ("OOM(backward)", 2 << 30)
    assert "allocated_peak_bytes" not in row


def test_the_recorded_script_leaves_the_phase_in_which_memory_ran_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_arguments: Any, **_named: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …")

    result = tmp_path / "result.json"
    setting = json.dumps({"size": "tiny", "context": 16, "device": "cpu", "steps": 2, "result": str(result)})
    training.main(setting)
    assert json.loads(result.read_text()) is None
    for phase, owner, name in (
        ("model", torch, "randint"),
        ("backward", torch.Tensor, "backward"),
        ("optimizer", torch.optim.AdamW, "step"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, short)
            training.main(setting)
        found = json.loads(result.read_text())
        assert (found["phase"], found["requested_bytes"]) == (phase, 2 << 30)


def test_outside_cuda_only_a_forward_pass_must_fit_and_a_cell_has_no_peaks() -> None:
    """With checkpoints nothing runs there."""
    train = _cell(context=256, batch=4)
    on_cpu, on_cuda = predict(train, "cpu"), predict(train, "cuda")
    row = measure_cell(train, "cpu", {})
    assert 4 * PRESETS["tiny"].parameter_count + int(str(row["saved_bytes"])) < on_cpu < on_cuda / 1.4
    assert not {"allocated_peak_bytes", "largest", "difference_bytes"} & row.keys()
    assert row["residual_bytes"] == 4 * 256 * 128 * 4
    assert measure_cell(_cell(checkpoint_layers=1), "cpu", {}) == {"status": "ok"}


def test_the_peaks_of_a_real_snapshot_are_those_the_allocator_reported() -> None:
    """The allocator itself reported the peaks (traces/README.md)."""
    row: dict[str, Any] = read_recorded(TRACE, SMALL)
    assert (row["allocated_peak_bytes"], row["reserved_peak_bytes"]) == (3_276_553_216, 3_462_397_952)
    assert (row["peak_phase"], row["is_exact"], row["replay_difference_bytes"]) == ("backward", True, None)
    assert row["phase_peaks"].keys() == {"forward", "loss", "backward", "optimizer"}
    first = row["largest"][0]
    assert (first["bytes"], first["category"], first["phase"]) == (41_943_040, "activations", "forward")
    assert first["label"].startswith("transformer.py:")


def test_the_difference_is_between_the_two_peaks_whatever_their_phases() -> None:
    predicted = {peak.phase: peak.bytes for peak in predict_memory(SMALL).peaks}
    row: dict[str, Any] = compare_phases({**predicted, "optimizer": predicted["backward"] + 10}, SMALL)
    assert (row["requested_phase"], row["difference_bytes"]) == ("optimizer", 10)
    assert row["requested_phases"][-1]["difference_bytes"] == predicted["backward"] + 10 - predicted["optimizer"]


@pytest.mark.parametrize("asked", [["--checkpoint-layers", "3"], ["--checkpoint-layers", "1", "--passes", "forward"]])
def test_checkpoints_of_no_cell_are_refused(asked: list[str]) -> None:
    done = CliRunner().invoke(main, ["--device", "cpu", *asked])
    assert isinstance(done.exception, UsageError)
    assert str(done.exception).startswith(f"--checkpoint-layers {asked[1]}: no cell has it")


def _row(**changed: Any) -> dict[str, Any]:
    """Return a row as measured, with what arithmetic says of it; ``peak`` is the predicted and the measured one."""
    cell = {"size": "2.7B", "context": 512, "passes": "train", "dtype": "fp32", "checkpoint_layers": 0, "batch": 4}
    row: dict[str, Any] = {
        **cell,
        "device": "cuda",
        "status": "ok",
        **{key: changed[key] for key in cell & changed.keys()},
    }
    add_columns([row])
    peak = changed.pop("peak", row["predicted_peak_bytes"])
    phase = changed.pop("phase", row["predicted_phase"])
    measured = {"phase": phase, "requested_bytes": peak, "predicted_bytes": peak, "difference_bytes": 0}
    row |= {"requested_peak_bytes": peak, "predicted_peak_bytes": peak, "difference_bytes": 0}
    row |= {"allocated_peak_bytes": peak + 2**20, "reserved_peak_bytes": peak + GIB, "replay_difference_bytes": 0}
    row |= {"peak_phase": phase, "requested_phase": phase, "requested_phases": [measured], "predicted_phase": phase}
    return row | changed


def test_a_difference_from_the_prediction_a_warning_and_a_peak_before_the_first_phase_are_shown() -> None:
    row = _row()
    text = report([row], {}).markdown
    assert "1 of 1 measured peaks of phases are the predicted ones to the byte." in text
    assert "1 of 1 replayed peaks are `torch.cuda.max_memory_allocated()` to the byte." in text
    row["requested_phases"][0]["difference_bytes"] = -512
    row |= {"replay_difference_bytes": 512, "warnings": ["the peak is a bound"]}
    row |= {"peak_phase": None, "requested_peak_bytes": row["requested_peak_bytes"] + 1}
    assert phase_of(row) == "the making of the model"
    text = report([row], {}).markdown
    assert "0 of 1 measured peaks of phases" in text
    assert "0 of 1 replayed peaks" in text
    assert re.search(r"\| backward \| \d+ \| \d+ \| -512 \|", text)
    assert not re.search(r"\| optimizer \| \d+ \|", text)
    assert "- the peak is a bound (1 of 1 rows)" in text
    assert "GiB, the making of the model |" in text
    assert "None |" not in text


def test_a_block_saves_what_a_hand_calculation_says() -> None:
    """In fp32: ten tensors of the stream, five of the inner width, exponentials and weights of the scores; small ones.

    The stream's: the input, both norms' scaled and output, rotated query and key, values by head, mixed values, the
    stream after attention. The inner width's: gate, sigmoid, their product, w3's output, w2's input.
    """
    row: dict[str, Any] = measure_cell(_cell(context=CONTEXT), "cpu", {})
    preset, rows = PRESETS["tiny"], BATCH * CONTEXT
    scores = BATCH * preset.num_heads * CONTEXT**2
    large = 10 * rows * preset.d_model + 5 * rows * preset.d_ff + 2 * scores
    small = scores // CONTEXT + 2 * rows  # the sums of the exponentials, 1 / root mean square
    mask_bytes = CONTEXT**2
    assert row["saved_bytes_by_block"] == [4 * (large + small) + mask_bytes] * preset.num_layers
    assert sum(part["bytes"] for part in row["saved_parts"]) == row["saved_block_bytes"]
    first = row["saved_parts"][0]
    assert (first["made_by"], first["saved_in"], first["count"]) == ("mm", "ffn", 2)
    assert first["bytes"] == 2 * 4 * rows * preset.d_ff
    assert (row["residual_shape"], row["residual_dtype"]) == ([BATCH, CONTEXT, preset.d_model], "float32")


@pytest.mark.parametrize("passes", ["forward", "forward-backward", "train"])
def test_saved_bytes_are_the_predicted_ones(passes: str) -> None:
    cell = _cell(passes=passes, context=CONTEXT)
    counted = measure_cell(cell, "cpu", {})["saved_bytes"]
    assert counted == describe_prediction(work_of(cell), "cpu")["predicted_saved_bytes"]
    assert (counted == 0) == (passes == "forward")


def test_autocast_copies_of_the_weights_are_saved() -> None:
    row: dict[str, Any] = measure_cell(_cell(dtype="bf16", context=CONTEXT), "cpu", {})
    preset = PRESETS["tiny"]
    weights = {part["bytes"]: part for part in row["saved_parts"] if part["made_by"] == "cast of a weight"}
    of_ffn = 2 * preset.d_model * preset.d_ff
    assert weights[of_ffn]["dtype"] == "bfloat16"
    assert weights[of_ffn]["saved_in"].startswith("ffn.w")
    assert row["residual_dtype"] == "float32"


class Twice(nn.Module):
    """Saves one storage twice, by a view too, a parameter, and what its input already is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        powers = torch.exp(hidden)
        return (powers @ self.weight) * powers.T.T


def test_a_storage_counts_once_where_it_is_saved_first() -> None:
    blocks = nn.ModuleList([Twice(), Twice()])
    given = torch.ones(3, 3)

    def forward() -> torch.Tensor:
        result = given
        for block in blocks:
            result = block(result)
        return torch.exp(result)

    saved = count_saved(blocks, blocks, [given], forward)
    first, second = saved.blocks
    # The first block's exponentials take no gradient; its product is kept by the multiplication.
    assert [part.made_by for part in first.parts] == ["without a gradient"]
    assert [part.made_by for part in second.parts] == ["exp", "mm"]
    assert (first.bytes, second.bytes, saved.outside_bytes) == (36, 72, 36)
    assert saved.bytes == 36 * 4
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in blocks.modules())


def test_equal_parts_are_grouped_and_add_up() -> None:
    parts = [Part("exp", "attention", (size, size), "float32", 4 * size**2) for size in range(1, 9)]
    lines: list[dict[str, Any]] = group_parts([*parts, parts[6], parts[7]])
    assert [line["count"] for line in lines] == [2, 2, 1, 1, 1, 3]
    assert sum(line["bytes"] for line in lines) == sum(part.bytes for part in (*parts, *parts[6:]))
    assert lines[-1]["made_by"] is None
    assert group_parts(parts[:1])[0]["count"] == 1


# -- predicted memory ----------------------------------------------------------------------------------------------


def work(size: str, dtype: str, passes: str, **more: Any) -> Work:
    return Work(size, **{"context": 256, **more}, dtype=dtype, passes=passes)


def test_for_compiled_code_only_what_stands_outside_is_predicted() -> None:
    eager, compiled = (predict_memory(work("tiny", "bf16", "train", compiled=compiled)) for compiled in (False, True))
    assert not compiled.saved
    assert compiled.peak.bytes < eager.peak.bytes
    assert {line.category for line in compiled.peaks[-1].lines} >= {"parameters", "gradients", "optimizer state"}


class CudaCasts(TorchFunctionMode):
    """Autocast on a CPU casts other operations than on CUDA: cast here what CUDA's lists say, and not the CPU's."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.dtype == torch.bfloat16:
            if function in {torch.exp, torch.Tensor.sum}:
                args = (first.float(), *args[1:])
            if function is functional.cross_entropy:
                return functional.nll_loss(functional.log_softmax(first, 1).float(), args[1])
        return function(*args, **(kwargs or {}))


def _autocast(dtype: str) -> ExitStack:
    stack = ExitStack()
    if dtype == "bf16":
        stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        stack.enter_context(CudaCasts())
    return stack


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["tiny", "small"])
def test_the_saved_tensors_are_those_that_autograd_saves(name: str, dtype: str) -> None:
    """The real model on tensors without memory: each storage that autograd is given, once."""
    preset, batch, context = PRESETS[name], 3, 48
    seen: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        seen.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with FakeTensorMode():
        model = TransformerLM(preset, context)
        tokens = torch.randint(preset.vocab_size, (batch, context + 1))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            with _autocast(dtype):
                logits = model(tokens[:, :-1])
            with _autocast(dtype):
                functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    standing = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), tokens)}
    sizes = Counter(t.untyped_storage().nbytes() for key, t in seen.items() if key not in standing)
    account = StepAccount(work(name, dtype, "train", batch=batch, context=context), 0)
    assert Counter(block.bytes for block in account.saved) == sizes


# No two of its tensors' kinds are alike in size.
ODD = Preset("odd", 96, 416, 2, 3, 1000)
CONTEXT = 40


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("passes", "layers"), [*(("train", layers) for layers in (0, 1, 2, 3, 7)), ("forward", 0), ("forward", 2)]
)
def test_every_allocation_of_a_real_step_is_predicted(
    layers: int, dtype: str, passes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tape equals the allocations and frees that torch's profiler sees on a CPU, in order.

    Without scalars, and without what a CPU kernel allocates and frees inside. Of three layers none is checkpointed, or
    one, two, all, or more than there are run again together.
    """
    preset = replace(ODD, num_layers=3)
    monkeypatch.setitem(PRESETS, "odd", preset)
    checkpointed = work("odd", dtype, passes, batch=2, context=CONTEXT, checkpoint_layers=layers)
    recorded = _in_runs(_recorded(StepAccount(checkpointed, 0)))
    assert recorded == _in_runs(_profiled_step(preset, 2, dtype, passes, layers))


def _recorded(account: StepAccount) -> list[tuple[int, int]]:
    _, start = account.tape.phases[1]
    return [(sign, block.bytes) for sign, block in account.tape.events[start:]]


def _in_runs(events: list[tuple[int, int]]) -> list[tuple[int, list[int]]]:
    """Put each stretch of nothing but allocations, or of frees, in order of size: its order moves no peak."""
    large = [(sign, size) for sign, size in events if size > 8]
    return [(sign, sorted(size for _, size in run)) for sign, run in itertools.groupby(large, key=lambda one: one[0])]


class CastingLM(TransformerLM):
    """Casts as CUDA does in the layers also when a checkpoint runs them again, in backward."""

    def _run(self, *args: Any) -> Any:
        with CudaCasts():
            return super()._run(*args)


def _profiled_step(
    preset: Preset, batch: int, dtype: str, passes: str, checkpoint_layers: int = 0
) -> list[tuple[int, int]]:
    model = (CastingLM if dtype == "bf16" else TransformerLM)(preset, CONTEXT, checkpoint_layers)
    tokens = torch.randint(preset.vocab_size, (batch, CONTEXT + 1))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        with torch.no_grad() if passes == "forward" else nullcontext(), _autocast(dtype):
            logits = model(tokens[:, :-1])
            if passes == "forward":
                del logits
                return
        with _autocast(dtype):
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if passes == "train":
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    return _without_scratch(profile)


_ELEMENTWISE = {f"aten::{name}" for name in ("mul", "add", "sub", "div")}


def _without_scratch(profile: Any) -> list[tuple[int, int]]:
    """Return the profile's allocations and frees but for what a kernel made and freed: packed operands, casts."""
    events: list[tuple[int, Any, tuple[Any, ...]]] = []
    for root in profile.profiler.kineto_results.experimental_event_tree():
        _collect(root, (), events)
    events.sort(key=lambda one: one[0])
    born: dict[int, int] = {}
    is_scratch = [False] * len(events)
    for place, (_, fields, parents) in enumerate(events):
        if fields.alloc_size > 0:
            born[fields.ptr] = place
        elif fields.ptr in born and parents:
            start = born.pop(fields.ptr)
            around = events[start][2]
            is_inside = parents[-1] is around[-1] if around else False
            is_cast = parents[-1].name in _ELEMENTWISE and any(parents[-1] is one for one in around)
            is_scratch[start] = is_scratch[place] = is_inside or is_cast
    kept = [event for event, scratch in zip(events, is_scratch, strict=True) if not scratch]
    return [(1 if fields.alloc_size > 0 else -1, abs(fields.alloc_size)) for _, fields, _ in kept]


def _collect(event: Any, parents: tuple[Any, ...], found: list[tuple[int, Any, tuple[Any, ...]]]) -> None:
    if event.name == "[memory]":
        found.append((event.start_time_ns, event.extra_fields, parents))
    for child in event.children:
        _collect(child, (*parents, event), found)
