"""A training script with many ways to train: prints each one's losses to the bit, plain or with profkit's hooks.

``python hooked_workloads.py [hooked] [counted] [remembered FOLDER]``; hooked, it also prints every range that was
opened and closed, by thread; counted, the work of each one's third step; remembered (alone), the memory of a CUDA of
paper is recorded into the folder too, saved tensors included.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from profkit.capture.work.counter import WorkCounter

ACTIVATIONS: list[weakref.ref[Tensor]] = []
EVENTS: list[tuple[str, str, int]] = []
WORK: list[dict[str, Any]] = []


class Marked(torch.autograd.Function):
    """The identity; notes when its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        for kind in ("open", "close"):
            EVENTS.append((kind, "marked", threading.get_ident()))
        return gradient


class Mark(nn.Module):
    """The identity as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return Marked.apply(x)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Linear, an addition in place onto its output, ReLU in place."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.mark = Mark() if how == "plain" else nn.Identity()
        self.keeps_products = how == "selective"
        self.linear = nn.Linear(8, 8)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.keeps_products:
            y = y + x
        else:
            y += x
        return self.mark(self.relu(y))  # type: ignore[no-any-return]


class DictBlock(nn.Module):
    """Takes a keyword, returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block("dict")

    def forward(self, *, hidden: Tensor) -> dict[str, Any]:
        return {"hidden": self.block(hidden), "rest": [None, 3]}


class OthersCheckpoint(torch.autograd.Function):
    """A checkpoint as DeepSpeed and Megatron write their own."""

    @staticmethod
    def forward(ctx: Any, block: Any, x: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "others": {},
    "nested": {"use_reentrant": False},
    "nested-reentrant": {"use_reentrant": True},
    "selective": {"use_reentrant": False, "context_fn": lambda: create_selective_checkpoint_contexts(_keep_products)},
}


def _keep_products(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    is_product = operator is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class Model(nn.Module):
    """Blocks run plain, checkpointed (``nested``: all of them once more), or as dicts."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(DictBlock() if how == "dict" else Block(how) for _ in range(3))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8, 1)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.how == "dict":
                x = block(hidden=Marked.apply(x))["hidden"]
            elif self.how.startswith("nested"):
                continue
            elif self.how == "others":
                x = OthersCheckpoint.apply(block, x)
            elif self.how in CHECKPOINTS:
                x = checkpoint(block, x, **CHECKPOINTS[self.how])
            else:
                x = block(x)
                if not torch.compiler.is_compiling():
                    ACTIVATIONS.append(weakref.ref(x))
        if self.how.startswith("nested"):
            x = checkpoint(self._nested, x, **CHECKPOINTS[self.how])
        if self.fails:
            raise ValueError("a bad batch")
        return self.head(self.dropout(x))  # type: ignore[no-any-return]

    def _nested(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, **CHECKPOINTS[self.how])
        return x


class Penalised(nn.Module):
    """Adds to a critic's scores how far their gradient by the input is from one, as a Wasserstein GAN does."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = Model("penalty")

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        scores = self.critic(x)
        (gradient,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return scores + (gradient.norm(dim=1) - 1).square().mean()  # type: ignore[no-any-return]


def _set_functional_gradients(model: nn.Module, criterion: nn.Module) -> Tensor:
    """Set the parameters' gradients as ``torch.func`` gives them, and return the loss."""

    def loss_of(parameters: dict[str, Tensor]) -> Tensor:
        return criterion(functional_call(model, parameters, torch.randn(4, 8)), torch.ones(4, 1))  # type: ignore[no-any-return]

    parameters = {name: one.detach() for name, one in model.named_parameters()}
    gradients, loss = grad_and_value(loss_of)(parameters)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    return loss  # type: ignore[no-any-return]


class Replicated(nn.DataParallel):  # type: ignore[type-arg]
    """Runs two copies of the model, each on a thread of its own, as torch does it with two GPUs."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)  # torch's own looks for GPUs, and moves the model to the first
        self.module = module
        self.device_ids: list[int] = []
        self.dim = 0

    def forward(self, x: Tensor) -> Tensor:
        replicas = [_replica(self.module) for _ in range(2)]
        return torch.cat(self.parallel_apply(replicas, [(part,) for part in x.chunk(2)], [{}, {}]))


def _replica(module: Any) -> Any:
    replica = module._replicate_for_data_parallel()
    for name, parameter in module.named_parameters(recurse=False):
        setattr(replica, name, parameter)
    for name, child in module.named_children():
        replica._modules[name] = _replica(child)
    return replica


def _on_threads(modules: Any, inputs: Any, kwargs: Any, _devices: Any) -> list[Tensor]:
    """Take the place of torch's own, which needs GPUs; one after the other, so that dropout draws the same numbers."""
    outputs: list[Tensor] = []
    for module, args, words in zip(modules, inputs, kwargs, strict=True):
        thread = threading.Thread(target=lambda call=module, a=args, k=words: outputs.append(call(*a, **k)))
        thread.start()
        thread.join()
    return outputs


def train(how: str) -> tuple[list[str], list[int]]:
    """Train for four steps and return the losses, exactly, and how many activations were alive before each backward
    and after it."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model: Any = Penalised() if how == "penalty" else Model(how)
    called = torch.compile(model, backend="aot_eager", fullgraph=True) if how == "compiled" else model
    if how == "replicas":
        # torch.nn.parallel has a function of this module's name.
        sys.modules["torch.nn.parallel.data_parallel"].parallel_apply = _on_threads  # type: ignore[attr-defined]
        called = Replicated(model)
    optimizer: Any = torch.optim.LBFGS if how == "closure" else torch.optim.AdamW
    optimizer = optimizer(model.parameters(), lr=0.01)
    criterion = nn.MSELoss()
    losses: list[str] = []
    alive: list[int] = []
    ACTIVATIONS.clear()

    def forward_backward() -> Tensor:
        if how == "function":
            loss = _set_functional_gradients(model, criterion)
            losses.append(loss.item().hex())
            return loss
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            loss = criterion(called(torch.randn(4, 8)), torch.ones(4, 1))
        if how in {"penalty", "branches"}:
            for _ in range(2):
                loss = loss + Marked.apply(called(torch.randn(4, 8))).mean()
        alive.append(sum(one() is not None for one in ACTIVATIONS))
        if how == "grad":
            parameters = list(model.parameters())
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient
        else:
            loss.backward()
        alive.append(sum(one() is not None for one in ACTIVATIONS))
        losses.append(loss.item().hex())
        return loss  # type: ignore[no-any-return]

    for number in range(4):
        counter = WorkCounter() if number == 2 and "counted" in sys.argv else None
        if counter is not None:
            counter.start()
        optimizer.zero_grad()
        if how == "exception":
            _fail_once(model)
        for _ in range(3 if how == "accumulation" else 1):
            if how != "closure":
                forward_backward()
        optimizer.step(forward_backward) if how == "closure" else optimizer.step()
        if how == "evaluation":
            model.eval()
            with torch.no_grad():
                losses.append(model(torch.ones(2, 8)).sum().item().hex())
            model.train()
        if counter is not None:
            counter.stop()
            WORK.append(asdict(counter.content()))
    return losses, alive


def _fail_once(model: Any) -> None:
    model.fails = True
    try:
        model(torch.randn(4, 8))
    except ValueError:
        model.fails = False
    x = torch.ones(8, requires_grad=True)
    y = model.first(x)
    y.register_hook(_raise)
    try:
        y.sum().backward()
    except ValueError:
        x.grad = None


def _raise(_gradient: Tensor) -> None:
    raise ValueError("a bad gradient")


WORKLOADS = (
    "plain",
    "dict",
    "reentrant",
    "non-reentrant",
    "others",
    "nested",
    "nested-reentrant",
    "selective",
    "penalty",
    "branches",
    "function",
    "accumulation",
    "evaluation",
    "exception",
    "autocast",
    "closure",
    "grad",
    "replicas",
    "compiled",
)


def _remember(folder: Path) -> Any:
    """Record the memory of a CUDA of paper, from now on."""
    from profkit.capture.memory_history import MemoryRecording
    from profkit.run.recording import MemoryOptions
    from tests import paper_cuda

    memory = MemoryRecording(folder, MemoryOptions())
    memory.wait_for_cuda()
    paper_cuda.install()
    torch.cuda.init()
    return memory


class Always:
    """A listener that calls ``begin`` with the number of each step, and lets no failure of a hook pass."""

    def __init__(self, begin: Callable[[int], None]) -> None:
        self._begin = begin

    def boundary(self, number: int) -> None:
        self._begin(number)

    def hooks_failed(self, error: Exception) -> None:
        raise error


def _log_ranges() -> tuple[Callable[[], None], Callable[[], None]]:
    """Write ranges to profkit's own log from the first step on; return what stops that and what fills EVENTS."""
    from profkit.capture.hooks.hooks import Hooks
    from profkit.run.range_log import LEFT

    def begin(number: int) -> None:
        hooks.prepare()
        if number == 0:
            hooks.start_log()
            hooks.start()

    taken: defaultdict[int, int] = defaultdict(int)

    def take() -> None:
        log = hooks.log.content()
        for at, thread in enumerate(log.threads):
            opened: list[str] = []
            first, taken[at] = taken[at], len(thread.entries)
            for number in thread.entries[first::2]:
                if number != LEFT:
                    opened.append(log.names[number])
                if number != LEFT or opened:
                    kind, name = ("close", opened.pop()) if number == LEFT else ("open", opened[-1])
                    EVENTS.append((kind, name, thread.number))

    hooks = Hooks(Always(begin), depth=3)
    hooks.install()
    return hooks.stop, take


def _install(memory: Any) -> Callable[[], None]:
    """Open ranges from the first step on, and note each in EVENTS instead of showing it to a profiler."""
    from profkit.capture.hooks import open_ranges
    from profkit.capture.hooks.hooks import Hooks

    class Noted:
        def __init__(self, name: str, _flops: None) -> None:
            self.attributes = self.domain = name

        def push(self, name: str, _domain: str) -> None:
            EVENTS.append(("open", name, threading.get_ident()))

        def pop(self, name: str) -> None:
            EVENTS.append(("close", name, threading.get_ident()))

        def open(self, _shown_to: object) -> None:
            self.push(self.attributes, self.domain)

        def close(self, _token: None, _shown_to: object) -> None:
            self.pop(self.domain)

    open_ranges.Range = Noted  # type: ignore[assignment, misc]

    def begin(number: int) -> None:
        if memory is not None:
            memory.boundary(number)
        if number == 0:
            hooks.start()

    hooks = Hooks(Always(begin), depth=3, watcher=memory)
    hooks.install()
    return hooks.stop


def main() -> None:
    """Print what every workload gave."""
    # The outer of two reentrant checkpoints runs the inner one with gradients off.
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
    memory = _remember(Path(sys.argv[2])) if "remembered" in sys.argv else None
    stop = _install(memory) if "hooked" in sys.argv or memory is not None else None
    take_events = EVENTS.clear
    if "logged" in sys.argv:
        stop, take_events = _log_ranges()
    found: dict[str, Any] = {}
    for how in WORKLOADS:
        gc.collect()  # the optimizer that counted is gone
        take_events()
        EVENTS.clear()
        losses, alive = train(how)
        if "logged" in sys.argv:
            take_events()
        found[how] = {
            "losses": losses,
            "alive": alive,
            "graph_breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        }
        found[how]["events"] = list(EVENTS)
        found[how]["work"] = WORK[-1:]
    EVENTS.clear()
    if stop is not None:
        stop()
    if memory is not None:
        from tests.paper_cuda import CALLS

        memory.steps_end()
        memory.close()
        found["memory"] = {**asdict(memory.result()), "calls": CALLS}
    found["end"] = {"events": EVENTS}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
