"""What profkit replaces in the program's process, and why: one way to do it, and to undo it.

A replacement calls what it stands for with whatever it was called with, so that it outlives a new argument. What torch
or NVTX does not have under a name is left alone: what it would have shown is not seen.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Function = Callable[..., Any]
Result = TypeVar("Result")

_OPTIMIZERS = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW"),
    *("Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)

REASONS = {
    "nvtx.annotate.__call__": "functions that the script decorates with NVTX's ranges",
    "nvtx.annotate.__enter__": "the script's own ranges open, in whose order profkit's must nest",
    "nvtx.annotate.__exit__": "they close",
    "nvtx.pop_range": "they close",
    "nvtx.push_range": "they open",
    "torch._C._accelerator_resetPeakStats": "the script resets the allocator's peaks, which are noted before",
    "torch._C._cuda_resetPeakMemoryStats": "the script resets the allocator's peaks, which are noted before",
    "torch._C._cuda_record_memory_history": "the script records the allocator's history itself",
    "torch._C._cuda_record_memory_history_legacy": "the script records the allocator's history itself",
    "torch._C._autograd._push_saved_tensors_default_hooks": "saved tensors may be packed, and are not to be read",
    "torch._dynamo.output_graph.OutputGraph.call_user_compiler": "Dynamo has traced a graph",
    "torch._inductor.codecache.PyCodeCache.load_by_key_path": "generated code is loaded",
    "torch._inductor.codegen.triton.TritonScheduling.define_kernel": "the operators that a fused kernel is made of",
    "torch._inductor.codegen.wrapper.PythonWrapperCodegen.generate_kernel_call": "launches that it does not report",
    "torch._inductor.codegen.cpp.set_kernel_post_grad_provenance_tracing": "launches that Inductor writes",
    "torch._inductor.codegen.triton.set_kernel_post_grad_provenance_tracing": "launches that Inductor writes",
    "torch._inductor.debug.set_kernel_post_grad_provenance_tracing": "launches that Inductor writes",
    "torch._inductor.runtime.triton_heuristics.CachingAutotuner.autotune_to_one_config": "kernels run to be compared",
    "torch._inductor.scheduler.Scheduler.codegen_extern_call": "calls of libraries that Inductor does not report",
    "torch.autograd.backward": "backward passes begin and end",
    "torch.autograd.grad": "backward passes begin and end",
    "torch.autograd.profiler.profile.__exit__": "the script's own torch.profiler ends",
    "torch.autograd.profiler.profile._prepare_trace": "it begins: a process has only one",
    "torch.autograd.profiler.record_function.__enter__": "the script's own ranges open",
    "torch.autograd.profiler.record_function.__exit__": "they close",
    "torch.compile": "Dynamo passes over the frames of the hooks",
    "torch.ctc_loss": "where operators are counted it would take another way, which fails for lengths on the host",
    "torch.cuda.CUDAGraph.capture_begin": "what follows is captured into a CUDA graph and does not run",
    "torch.cuda.CUDAGraph.capture_end": "the capture ends",
    "torch.cuda.CUDAGraph.replay": "a captured step runs",
    "torch.cuda.nvtx.range_pop": "the script's own ranges close",
    "torch.cuda.nvtx.range_push": "they open",
    "torch.distributed.destroy_process_group": "torch forgets the collectives of a group that is destroyed",
    "torch.distributed.device_mesh.DeviceMesh.__init__": "a mesh names groups by their dimension",
    "torch.nn.DataParallel.parallel_apply": "replicas work for a call on other threads",
    "torch.nn.Module.__call__": "calls of modules begin and end",
    "torch.nn.Module.__init_subclass__": "classes that can generate are made",
    "torch.nn.Module.zero_grad": "a trial sets gradients to None",
    **{f"torch.optim.{name}.__init__": "a trial adds a keyword to the optimizer" for name in _OPTIMIZERS},
    "torch.optim.optimizer.Optimizer.profile_hook_step": "optimizers' steps begin and end",
    "torch.optim.optimizer.Optimizer.zero_grad": "a trial sets gradients to None",
    "torch.utils.checkpoint.CheckpointFunction.forward": "checkpoints compute again, reentrant ones",
    "torch.utils.checkpoint._CheckpointFrame.__init__": "checkpoints compute again, the others",
    "torch.utils.data.dataloader.DataLoader.__init__": "where loaders are made; a trial changes how batches are",
    "torch.utils.data.dataloader.DataLoader.__iter__": "the program waits for data",
    "torch.utils.data.dataloader._BaseDataLoaderIter.__next__": "the program waits for data",
    "warnings._filters_mutated": "the filter that lets torch's warnings of waits through stays the first",
    "warnings._filters_mutated_lock_held": "the same, in Python 3.14",
    "warnings._showwarnmsg": "calls that wait for the GPU, each of which torch warns of",
}
"""Every function of others that profkit replaces, and what for."""


@dataclass(frozen=True)
class _Replaced:
    owner: Any
    name: str
    before: Any
    """What the owner itself held, `_INHERITED` if it was its base's."""
    now: Any


_INHERITED = object()
_replaced: defaultdict[str, list[_Replaced]] = defaultdict(list)
_staying: defaultdict[str, list[_Replaced]] = defaultdict(list)


def patch(target: str, wrap: Callable[[Function], Any], *, stays: bool = False) -> bool:
    """Put ``wrap(function)`` in the place of the function ``target``, and return whether there is one to replace.

    A static or class method stays one; a ``classmethod`` that ``wrap`` returns itself is put there as it is. Nothing is
    imported for it.

    Args:
        target: its full name, a key of `REASONS`.
        stays: `restore` does not put it back: what was compiled, or will be, depends on it.
    """
    assert target in REASONS, target
    owner, name = _owner_of(target)
    function = getattr(owner, name, None)
    if function is None:
        return False
    before = vars(owner).get(name, _INHERITED)
    kind = type(before) if isinstance(before, staticmethod | classmethod) else None
    plain = function if kind is None else before.__func__
    made = wrap(plain)
    if isinstance(made, classmethod):
        now: Any = made
    else:
        functools.update_wrapper(made, plain)
        now = made if kind is None else kind(made)
    try:
        setattr(owner, name, now)
    except TypeError:  # a class that is written in C
        return False
    (_staying if stays else _replaced)[target].append(_Replaced(owner, name, before, now))
    return True


def is_patched(target: str) -> bool:
    return bool(_replaced.get(target) or _staying.get(target))


def restore(*targets: str) -> None:
    """Put back what stood at these targets, at all of them if none is named.

    Where somebody else has replaced profkit's replacement since, theirs stays, and calls it.
    """
    for target in targets or list(_replaced):
        _put_back(_replaced.pop(target, []))


def restore_all() -> None:
    """Put back also what otherwise stays: the program goes on without profkit."""
    restore()
    for target in list(_staying):
        _put_back(_staying.pop(target))


def _put_back(replacements: list[_Replaced]) -> None:
    for replaced in reversed(replacements):
        if vars(replaced.owner).get(replaced.name) is not replaced.now:
            continue
        if replaced.before is _INHERITED:
            delattr(replaced.owner, replaced.name)
        else:
            setattr(replaced.owner, replaced.name, replaced.before)


def call_between(before: Callable[[], None] | None, after: Callable[[], None] | None) -> Callable[[Function], Function]:
    """Return what `patch` needs to have ``before`` called before a function and ``after`` however it ended."""

    def wrap(plain: Function) -> Function:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before()
            try:
                return plain(*args, **kwargs)
            finally:
                if after is not None:
                    after()

        return watched

    return wrap


def call_first(before: Function) -> Callable[[Function], Function]:
    """Return what `patch` needs to have ``before`` called before a function, with the same arguments."""

    def wrap(plain: Function) -> Function:
        def watched(*args: Any, **kwargs: Any) -> Any:
            before(*args, **kwargs)
            return plain(*args, **kwargs)

        return watched

    return wrap


def outside_dynamo(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call a function of profkit's from a replacement that Dynamo passes over, or Dynamo would compile it too."""
    frames = torch._C._dynamo.eval_frame
    callback = frames.set_eval_frame(None)
    try:
        return function(*args, **kwargs)
    finally:
        frames.set_eval_frame(callback)


def _owner_of(target: str) -> tuple[Any, str]:
    parts = target.split(".")
    length = next((length for length in range(len(parts) - 1, 0, -1) if ".".join(parts[:length]) in sys.modules), 0)
    owner = sys.modules.get(".".join(parts[:length]))
    for name in parts[length:-1]:
        owner = getattr(owner, name, None)
    return owner, parts[-1]
