"""Edits of what stands around the model: the optimizer, its gradients, and the loader of data."""

from __future__ import annotations

from fractions import Fraction
from inspect import signature
from multiprocessing import active_children
from typing import Any
from weakref import WeakSet

import torch
from torch import nn, optim
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset

from profkit.capture.changes.change import NO_GPU, Change, count
from profkit.capture.patches import Function, patch
from profkit.run.edits import read_factor


class _OperatorNames(TorchDispatchMode):
    """Notes which operators run while it is entered."""

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
        self._is_inside = False
        self._used: WeakSet[Optimizer] = WeakSet()
        self._operators = _OperatorNames()
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
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
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

    def __init__(self, argument: str) -> None:
        super().__init__(argument)
        self._changed = self._unchanged = 0

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

    def __init__(self, argument: str) -> None:
        super().__init__(argument)
        self.changed = 0
        self.why_unchanged = "the script makes no DataLoader"

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
        wanted, running = int(self.argument), len(active_children())
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
