"""Edits of the model, made when a training script calls it first, before that call runs; and of what stands around it:
the optimizer, its gradients, and the loader of data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from fractions import Fraction
from inspect import signature
from multiprocessing import active_children
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from profkit.capture.changes import NO_CALL, NO_GPU, Change, count, is_convolution, is_training_call
from profkit.capture.hooks.backward_nodes import running_graph
from profkit.capture.patches import Function, patch
from profkit.capture.steps.conditions import count_compiled_graphs, parameters_of
from profkit.run.edits import read_factor


class _ModelChange(Change):
    """An edit that is made once to each model that the script calls in training."""

    def __init__(self, argument: str) -> None:
        super().__init__(argument)
        self._seen: WeakSet[nn.Module] = WeakSet()

    def call_begins(self, module: nn.Module, args: Any, name: str | None) -> None:
        if self.refusal is None and module not in self._seen and is_training_call(module):
            self._seen.add(module)
            self.note_place()
            self.change(module)

    def change(self, module: nn.Module) -> None:
        raise NotImplementedError


class Compile(_ModelChange):
    """torch.compile for each model, in place."""

    def change(self, module: nn.Module) -> None:
        if any(_is_compiled(part) for part in module.modules()):
            self.refuse("the script compiles the model, or a part of it, already")
        elif type(module).forward.__module__.startswith("torch.nn.modules."):
            # Dynamo passes over code of torch's own, such as a Sequential's, unless it is given that very function.
            module.forward = torch.compile(module.forward, mode=self.argument or None)
        else:
            module.compile(mode=self.argument or None)

    def prove(self) -> str:
        self.require(self._seen and self.refusal is None, NO_CALL)
        graphs = count_compiled_graphs()
        self.require(graphs, "Dynamo compiled nothing of the model")
        return f"{count(graphs, 'compiled graph')} ran"


def _is_compiled(module: nn.Module) -> bool:
    is_wrapper = type(module).__name__ == "OptimizedModule"
    return is_wrapper or getattr(module, "_compiled_call_impl", None) is not None


class ChannelsLast(_ModelChange):
    """Weights and inputs of four dimensions with the channels last in memory."""

    _converted = 0

    def change(self, module: nn.Module) -> None:
        if not any(isinstance(part, nn.Conv2d) for part in module.modules()):
            self.refuse("the model has no convolution of two dimensions")
            return
        # A class may have a `to` of its own that knows no memory formats.
        nn.Module.to(module, memory_format=torch.channels_last)
        module.register_forward_pre_hook(self._convert, with_kwargs=True)

    def _convert(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(self._convert_one, args)), {name: self._convert_one(value) for name, value in kwargs.items()}

    def _convert_one(self, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.dim() == _IMAGES):
            return value
        self._converted += 1
        return value.contiguous(memory_format=torch.channels_last)

    def prove(self) -> str:
        self.require(self._seen and self.refusal is None, NO_CALL)
        weights = [part.weight for model in self._seen for part in model.modules() if is_convolution(part)]
        are_last = all(
            weight.is_contiguous(memory_format=torch.channels_last) for weight in weights if weight.dim() == 4
        )
        self.require(are_last, "the weights did not stay so")
        self.require(self._converted, "the model gets no input of four dimensions")
        return f"{count(len(weights), 'convolution')} and {count(self._converted, 'input')} were channels last"


_IMAGES = 4


class Checkpoint(_ModelChange):
    """The outermost modules that match run again in backward, in place of keeping what they computed."""

    _recomputed = 0

    def __init__(self, argument: str) -> None:
        super().__init__(argument)
        self._names: list[str] = []

    def begin(self) -> None:
        if ":" in self.argument:
            self.refuse("checkpoint:GLOB alone is made; options are predicted only")

    def change(self, module: nn.Module) -> None:
        if any(_is_compiled(part) for part in module.modules()):
            self.refuse("the script compiles the model, or a part of it")
            return
        matching = list(_outermost(module, self.argument))
        if not matching:
            kinds = ", ".join(name for name, _ in module.named_children())
            self.refuse(f"no module of {type(module).__name__} matches {self.argument}; it has {kinds}")
        for name, part in matching:
            self._names.append(name)
            part.forward = _checkpointed(part, part.forward)

    def recompute_ends(self, kept: Callable[[], list[Tensor]]) -> None:
        self._recomputed += 1

    def prove(self) -> str:
        self.require(self._seen and self.refusal is None, NO_CALL)
        is_seen = self._recomputed or count_compiled_graphs()
        self.require(is_seen, "nothing was computed again in backward")
        how = f"computed again {self._recomputed} times" if self._recomputed else "computed again in compiled code"
        return f"{len(self._names)} modules ({self._names[0]} … {self._names[-1]}) were {how}"


def _outermost(model: nn.Module, glob: str) -> Iterator[tuple[str, nn.Module]]:
    taken: list[str] = []
    for name, module in model.named_modules():
        is_within = any(name.startswith(f"{outer}.") for outer in taken)
        if name and not is_within and (fnmatchcase(name, glob) or fnmatchcase(name, f"*.{glob}")):
            taken.append(name)
            yield name, module


def _checkpointed(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if module.training and torch.is_grad_enabled():
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return forward(*args, **kwargs)

    return checkpointed


class Autocast(Change):
    """Autocast to bf16 around the forward pass and the loss: from a call in training until the backward pass."""

    _open: torch.autocast | None = None
    _forwards = 0

    def call_begins(self, module: nn.Module, args: Any, name: str | None) -> None:
        if self.refusal is not None or self._open is not None or not is_training_call(module):
            return
        self.note_place()
        device = next(module.parameters()).device.type
        if torch.is_autocast_enabled(device):
            self.refuse("the script computes under autocast already")
        elif all(parameter.dtype in _HALVES for parameter in module.parameters()):
            self.refuse("the model's parameters are of 16 bits already")
        else:
            self._open = torch.autocast(device, dtype=torch.bfloat16)
            self._open.__enter__()

    def call_ends(self, keywords: Any) -> None:
        if self._open is not None:
            device = self._open.device
            is_active = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
            self._forwards += is_active

    def backward_begins(self, tensors: Any) -> None:
        if running_graph() == -1:
            self._close()

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        self._close()

    def step_begins(self) -> None:
        self._close()

    def _close(self) -> None:
        if self._open is not None:
            opened, self._open = self._open, None
            opened.__exit__(None, None, None)

    def prove(self) -> str:
        self._close()
        self.require(self._forwards and self.refusal is None, NO_CALL)
        return f"autocast to bf16 was on in {self._forwards} forward passes"


_HALVES = (torch.bfloat16, torch.float16)


class _OperatorNames(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


class OptimizerKeyword(Change):
    """``fused=True`` or ``foreach=True`` in the constructors of torch's optimizers; a script's own wish stays."""

    def __init__(self, argument: str) -> None:
        super().__init__(argument)
        self._others = {"fused", "foreach"} - {argument}
        self._used: WeakSet[Optimizer] = WeakSet()
        self._operators = _OperatorNames()
        self._is_inside = False
        self._is_watching = False
        self._is_left_to_torch = False
        self._steps = 0

    def begin(self) -> None:
        for name, kind in vars(optim).items():
            if isinstance(kind, type) and self.argument in signature(kind).parameters:
                patch(f"torch.optim.{name}.__init__", self._around)

    def _around(self, plain: Function) -> Function:
        def made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            # A constructor calls that of its base, which is replaced too.
            if self._is_inside:
                plain(optimizer, *args, **kwargs)
                return
            self.note_place()
            self._is_inside = True
            try:
                plain(optimizer, *args, **{**kwargs, **self._keywords(kwargs)})
            finally:
                self._is_inside = False

        return made

    def _keywords(self, given: dict[str, Any]) -> dict[str, bool]:
        keyword = self.argument
        stands_against = [name for name in (*self._others, "differentiable") if given.get(name)]
        if stands_against:
            self.refuse(f"the script itself sets {stands_against[0]}=True")
            return {}
        if given.get(keyword):
            self.refuse(f"the script sets {keyword}=True already")
        self._is_left_to_torch = given.get("foreach") is None and given.get("fused") is None
        return {keyword: True}

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        self._used.add(optimizer)
        self._steps += 1
        parameters = parameters_of(optimizer)
        if self.argument == "foreach" and self._is_left_to_torch and all(each.is_cuda for each in parameters):
            self.refuse("torch does so already on a GPU, where a script says nothing")
        if self._steps == _WATCHED_STEP:
            self._is_watching = True
            self._operators.__enter__()

    def optimizer_ends(self, optimizer: Optimizer) -> None:
        if self._is_watching:
            self._is_watching = False
            self._operators.__exit__(None, None, None)

    def prove(self) -> str:
        keyword = self.argument
        self.require(self._used, "no step of an optimizer was seen")
        names = ", ".join(sorted({type(optimizer).__name__ for optimizer in self._used}))
        is_set = [group.get(keyword) for optimizer in self._used for group in optimizer.param_groups]
        self.require(self.refusal is None and all(is_set), f"{names} takes no {keyword}, or the script sets it back")
        ran = sorted(name for name in self._operators.names if f"_{keyword}_" in name)
        self.require(ran, f"{names} ran no {keyword} operator in its {_WATCHED_STEP}nd step")
        return f"{keyword}=True in {count(len(is_set), 'group')} of {names}; {ran[0]} ran"


_WATCHED_STEP = 2
"""The first step makes the optimizer's state."""


class ZeroGrad(Change):
    """``set_to_none=True`` where the script sets gradients to zero."""

    _changed = _unchanged = 0

    def begin(self) -> None:
        for target in ("torch.optim.optimizer.Optimizer.zero_grad", "torch.nn.Module.zero_grad"):
            patch(target, self._around)

    def _around(self, plain: Function) -> Function:
        def zero_grad(owner: Optimizer | nn.Module, set_to_none: bool = True) -> None:
            if set_to_none:
                self._unchanged += 1
            else:
                self._changed += 1
                self.note_place()
            plain(owner, set_to_none=True)

        return zero_grad

    def prove(self) -> str:
        self.require(self._changed or not self._unchanged, "the script sets gradients to None already")
        self.require(self._changed, "the script calls no zero_grad of torch's")
        return f"{self._changed} calls of zero_grad set gradients to None in place of zero"


class _LoaderChange(Change):
    """Other arguments of the constructor of ``DataLoader``."""

    changed = 0
    why_unchanged = "the script makes no DataLoader"

    def begin(self) -> None:
        patch("torch.utils.data.dataloader.DataLoader.__init__", self._around)

    def _around(self, plain: Function) -> Function:
        own = signature(plain)
        defaults = {name: parameter.default for name, parameter in own.parameters.items()}

        def made(loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
            given = own.bind(loader, *args, **kwargs)
            changed = self.change({**defaults, **given.arguments}) if self.refusal is None else {}
            if changed:
                self.note_place()
                given.arguments.update(changed)
                self.changed += 1
            plain(*given.args, **given.kwargs)

        return made

    def change(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that are others than the script's; none where this loader stays as it is."""
        raise NotImplementedError

    def prove(self) -> str:
        self.require(self.changed, self.why_unchanged)
        return ""


class Workers(_LoaderChange):
    """Worker processes that make the batches, kept from epoch to epoch."""

    _running = 0
    """How many were seen to run at once; a script that has ended has none."""

    def step_begins(self) -> None:
        if self.refusal is None and self._running < int(self.argument):
            self._running = max(self._running, len(active_children()))

    def begin(self) -> None:
        if self.argument.isdecimal():
            super().begin()
        else:
            self.refuse("write workers:4")

    def change(self, given: dict[str, Any]) -> dict[str, Any]:
        wanted = int(self.argument)
        if isinstance(given["dataset"], IterableDataset):
            self.why_unchanged = "each worker would go through all of an IterableDataset"
            return {}
        if given["num_workers"] == wanted:
            self.why_unchanged = f"the script has {count(wanted, 'worker')} already"
            return {}
        if wanted:
            return {"num_workers": wanted, "persistent_workers": True}
        alone = {"num_workers": 0, "persistent_workers": False, "prefetch_factor": None, "timeout": 0}
        return {**alone, "multiprocessing_context": None}

    def prove(self) -> str:
        super().prove()
        wanted, running = int(self.argument), self._running
        self.require(running >= wanted, f"{running} worker processes run: the loader is not what feeds the steps")
        loaders, workers = count(self.changed, "loader"), count(wanted, "worker")
        return f"{loaders} got {workers}; processes that run: {running}"


class PinMemory(_LoaderChange):
    """Batches in pinned memory."""

    def change(self, given: dict[str, Any]) -> dict[str, Any]:
        if given["pin_memory"]:
            self.why_unchanged = "the script does so already"
            return {}
        return {"pin_memory": True}

    def prove(self) -> str:
        super().prove()
        self.require(torch.cuda.is_initialized(), NO_GPU)
        return f"{self.changed} loaders pin their batches"


class Batch(_LoaderChange):
    """Batches of another size, where a loader makes them."""

    def __init__(self, argument: str) -> None:
        super().__init__(argument)
        self._sizes: dict[tuple[int, int], int] = {}
        """The dataset's id and the size that its loader got → the script's own size."""

    def change(self, given: dict[str, Any]) -> dict[str, Any]:
        size, dataset = given["batch_size"], id(given["dataset"])
        if size is None or given["batch_sampler"] is not None:
            self.why_unchanged = "batches are made by the dataset, or by a sampler of the script's own"
            return {}
        if (dataset, size) in self._sizes:  # Lightning and accelerate make a loader anew from one that was changed
            return {}
        scaled = size * Fraction(read_factor(self.argument))
        if scaled.denominator != 1 or not scaled:
            self.refuse(f"{self.argument} of a batch of {size} is no whole number")
            return {}
        self._sizes[dataset, int(scaled)] = size
        return {"batch_size": int(scaled)}

    def prove(self) -> str:
        super().prove()
        sizes = dict.fromkeys(f"{new} for {old}" for (_, new), old in self._sizes.items())
        return f"batches of {', '.join(sizes)}"
