"""Predicted memory: what autograd saves, and every allocation of a step; the kept results hold what a GPU measured."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from profkit.models.options import PRESETS, Preset
from profkit.models.transformer import TransformerLM
from recipes.model_memory.predict import StepAccount, predict_memory
from recipes.whole_model.cells import Work


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
@pytest.mark.parametrize("name", PRESETS)
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


@pytest.mark.parametrize("passes", ["forward", "train"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layers", [0, 1, 2, 3, 7])
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
