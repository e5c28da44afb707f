"""Edits of the model: made when a training script calls it for the first time, before that call runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.checkpoint import checkpoint

from profkit.capture.changes.change import NO_CALL, Change, count, device_of, is_convolution, is_training_call
from profkit.capture.hooks.backward_nodes import running_graph
from profkit.capture.steps.conditions import count_compiled_graphs


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
        """Change a model whose first call in training begins."""
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

    def __init__(self, argument: str) -> None:
        super().__init__(argument)
        self._converted = 0

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

    def __init__(self, argument: str) -> None:
        super().__init__(argument)
        self._names: list[str] = []
        self._recomputed = 0

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
    """Yield the modules that match, without those within others; a glob may leave out the first parts of a name."""
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

    def __init__(self, argument: str) -> None:
        super().__init__(argument)
        self._open: torch.autocast | None = None
        self._forwards = 0

    def call_begins(self, module: nn.Module, args: Any, name: str | None) -> None:
        if self.refusal is not None or self._open is not None or not is_training_call(module):
            return
        self.note_place()
        device = device_of(module)
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
