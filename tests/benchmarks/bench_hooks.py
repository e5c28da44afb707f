"""What profkit's hooks cost a call of a module, forward and backward together.

    python tests/benchmarks/bench_hooks.py [--blocks 12] [--steps 20] [--rounds 15] [--smoke]

A small transformer trains on the CPU with no profiler listening, so that next to nothing but Python runs. The variants
take turns round by round, so that all of them see the same machine, and the time is this thread's own on a processor:
others on the machine do not count. Each line is the median over the rounds of what one module call costs more than it
does in the plain model, and what that is of the plain step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from statistics import median
from time import thread_time_ns
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from profkit.annotation import ignore_ranges, observe_ranges
from profkit.capture.hooks.hooks import Hooks

WIDTH, HEADS = 16, 2
WARMUP = 10
"""Steps before those that are timed: Python adapts its code anew whenever another variant begins."""
PATCHED = ((nn.Module, "__call__"), (torch.autograd, "backward"), (torch.optim.Optimizer, "profile_hook_step"))
"""What the hooks put their own in place of: all of them are on or off together."""


class Attention(nn.Module):
    """Causal attention, as nanoGPT writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.c_attn(x).split(WIDTH, dim=-1))
        y = scaled_dot_product_attention(*heads, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class StepsByHand:
    """Does nothing at a step's boundary."""

    def boundary(self, number: int) -> None:
        """Step ``number`` is about to begin."""

    def log_is_full(self) -> None:
        """The log may grow no more."""

    def hooks_failed(self, error: Exception) -> None:
        """A hook failed: there is nothing to measure."""
        raise error


@contextmanager
def empty_global_hooks() -> Iterator[None]:
    """Hook all modules with hooks that do nothing."""
    handles = [
        register_module_forward_pre_hook(lambda _module, _args: None),
        register_module_forward_hook(lambda _module, _args, _output: None, always_call=True),
    ]
    yield
    for handle in handles:
        handle.remove()


class Profkit:
    """The hooks of this process, which can be put on and taken off."""

    def __init__(self, depth: int | None) -> None:
        before = [getattr(owner, name) for owner, name in PATCHED]
        self._hooks = Hooks(StepsByHand(), depth=depth)
        self._hooks.install()
        self._after = [getattr(owner, name) for owner, name in PATCHED]
        self._take_off(before)

    @contextmanager
    def on(self, *, recording: bool, logs: bool = False) -> Iterator[None]:
        """Have the hooks in place, with ranges open or not, written to profkit's own log or not."""
        before = [getattr(owner, name) for owner, name in PATCHED]
        self._put(self._after)
        observe_ranges(self._hooks)
        if recording:
            self._hooks.start()
        if logs:
            self._hooks.start_log()
        yield
        self._hooks.stop()
        self._take_off(before)

    def _take_off(self, before: list[Any]) -> None:
        ignore_ranges(self._hooks)
        self._put(before)

    def _put(self, values: list[Any]) -> None:
        for (owner, name), value in zip(PATCHED, values, strict=True):
            setattr(owner, name, staticmethod(value) if name == "profile_hook_step" else value)


def bench(blocks: int, steps: int, rounds: int) -> None:
    """Run every variant by turns and print a line each."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    calls = sum(1 for _ in model.modules())
    everything, outermost = Profkit(depth=99), Profkit(depth=0)
    variants: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "plain model": nullcontext,
        "empty hooks of all modules": empty_global_hooks,
        "profkit, nobody listening": partial(everything.on, recording=False),
        "profkit, the outermost module": partial(outermost.on, recording=True),
        "profkit, all modules": partial(everything.on, recording=True),
        "profkit, all modules, in its log": partial(everything.on, recording=True, logs=True),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds + 1):
        for name, variant in variants.items():
            with variant():
                times[name].append(time_of_a_step(model, steps))
    plain = median(times["plain model"][1:])
    print(f"plain model: {plain / 1e3:.0f} µs a step, {calls} module calls, {plain / calls / 1e3:.2f} µs each")
    for name in variants:
        more = [one - other for one, other in zip(times[name][1:], times["plain model"][1:], strict=True)]
        print(f"{name:<36}{median(more) / calls / 1e3:+7.2f} µs a call {median(more) / plain:+8.2%} of the step")


def time_of_a_step(model: nn.Module, steps: int) -> float:
    """Return what a forward and a backward pass take of this thread's time on a processor, in ns."""
    x = torch.randn(1, 4, WIDTH, requires_grad=True)
    for _ in range(WARMUP):
        model(x).sum().backward()
    start_ns = thread_time_ns()
    for _ in range(steps):
        model(x).sum().backward()
    return (thread_time_ns() - start_ns) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20, help="steps a round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--smoke", action="store_true", help="one short round")
    options = parser.parse_args()
    bench(*(1, 1, 1) if options.smoke else (options.blocks, options.steps, options.rounds))


if __name__ == "__main__":
    main()
