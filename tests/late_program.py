"""Trains on several ranks, one of which is held up by a delay in each step, and writes down what each rank did.

    torchrun --nproc-per-node 2 late_program.py --way ddp --delay forward [--into FOLDER]

With a GPU it trains over NCCL (several ranks may share one GPU), else over gloo. As it is, the host sets the pace: many
small modules, and an optimizer that works parameter by parameter (some 130 modules; 27 ms a step where two ranks share
an H200). ``--size 2048 --batch 8192`` has the GPU set it.

Into ``log<rank>.json`` a rank writes, per step, the host's time at each of `MARKS` and how long the delay took (on the
GPU for ``kernels`` and ``copy``, else on the host). Nothing in this is profkit's: what profkit says is judged by it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset

WAYS = ("ddp", "fsdp2", "tp")
PLACES = ("none", "data", "forward", "backward", "collective", "optimizer", "after", "kernels", "copy")
"""Where a delay is: as the loader makes a batch, in a module's forward or backward, before a collective that the
program itself calls between backward and optimizer, in the optimizer's step, after it; on the GPU in a module's
forward, as a heavy kernel or as copies from the host."""

MARKS = ("begin", "data", "forward", "loss", "backward", "collective", "optimizer", "end")
"""What has just ended at a mark; between ``optimizer`` and ``end`` runs what comes after the optimizer's step."""

_COPY_BYTES = 1 << 28


class Delay:
    """Holds up this rank, if it is the late one, where it is asked to; ``taken_ns`` is how long, step by step."""

    def __init__(self, place: str, seconds: float, device: torch.device) -> None:
        self._place, self._seconds, self._device = place, seconds, device
        self.taken_ns: list[int] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._work: Callable[[], Any] | None = None
        self._times = 0
        if place in ("kernels", "copy") and seconds:
            self._calibrate()

    def at(self, place: str) -> None:
        """Hold up this rank if its delay is here."""
        if place != self._place or not self._seconds:
            return
        if self._device.type == "cuda" and place in ("kernels", "copy"):
            self._hold_up_gpu()
            return
        began = perf_counter_ns()
        if place == "kernels":
            matrix = torch.ones(256, 256)
            while perf_counter_ns() < began + self._seconds * 1e9:
                matrix @ matrix
        else:
            time.sleep(self._seconds)
        self.taken_ns.append(perf_counter_ns() - began)

    def finish(self) -> None:
        """Read how long the GPU was held up, which it has done by now."""
        self.taken_ns += [round(first.elapsed_time(last) * 1e6) for first, last in self._events]
        self._events = []

    def _hold_up_gpu(self) -> None:
        assert self._work is not None
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(self._times):
            self._work()
        last.record()
        self._events.append((first, last))

    def _calibrate(self) -> None:
        """Choose the work that keeps the GPU as long as is asked for."""
        if self._device.type != "cuda":
            if self._place == "copy":
                raise SystemExit("--delay copy needs a GPU")
            return
        if self._place == "copy":
            there = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=self._device)
            here = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
            self._work, self._times = lambda: there.copy_(here, non_blocking=True), 1
        else:
            self._work, self._times = lambda: torch.cuda._sleep(1_000_000), 1
        for _ in range(100):  # until the GPU has its usual clock
            self._hold_up_gpu()
        torch.cuda.synchronize()
        self.finish()
        once_ns = self.taken_ns[-1]
        self.taken_ns = []
        self._times = max(1, round(self._seconds * 1e9 / once_ns))
        if self._place == "kernels":  # one long kernel
            cycles = round(1_000_000 * self._seconds * 1e9 / once_ns)
            self._work, self._times = lambda: torch.cuda._sleep(cycles), 1


class _Through(torch.autograd.Function):
    """Passes a tensor on, and its gradient, which may take a while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delay: Delay) -> Tensor:
        ctx.delay = delay
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.delay.at("backward")
        return gradients[0], None


class Late(nn.Module):
    """Computes nothing, and is where delays of forward and backward are."""

    def __init__(self, delay: Delay) -> None:
        super().__init__()
        self._delay = delay

    def forward(self, x: Tensor) -> Tensor:
        for place in ("forward", "kernels", "copy"):
            self._delay.at(place)
        return _Through.apply(x, self._delay)  # type: ignore[no-any-return,no-untyped-call]


class Block(nn.Module):
    """An MLP behind a norm and around a residual: four modules and itself."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = (
            nn.LayerNorm(size),
            nn.Linear(size, 2 * size),
            nn.GELU(),
            nn.Linear(2 * size, size),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Blocks, with a `Late` between the two halves."""

    def __init__(self, size: int, blocks: int, delay: Delay) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size) for _ in range(blocks))
        self.late = Late(delay)
        self.half = blocks // 2

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number == self.half:
                x = self.late(x)
            x = block(x)
        return x


class Batches(Dataset[Tensor]):
    """One batch again and again."""

    def __init__(self, batch: Tensor, count: int, delay: Delay) -> None:
        self._batch, self._count, self._delay = batch, count, delay

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Tensor:
        self._delay.at("data")
        return self._batch


def optimizer_with(delay: Delay, model: nn.Module, way: str) -> torch.optim.Optimizer:
    """Return an AdamW that may take longer; under DDP it works parameter by parameter.

    Of DTensors that would take many times as long, and they cannot be updated together with plain tensors.
    """

    class LateAdamW(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            delay.at("optimizer")
            return super().step(closure)

    kinds: dict[type, list[Tensor]] = {}
    for parameter in model.parameters():
        kinds.setdefault(type(parameter.data), []).append(parameter)
    return LateAdamW([{"params": each} for each in kinds.values()], lr=1e-4, foreach=way != "ddp")


def parallel(model: nn.Module, way: str, device: torch.device) -> nn.Module:
    """Return the model as the ranks train it together."""
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),), mesh_dim_names=(way,))
    if way == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def join() -> torch.device:
    """Join the other ranks, over NCCL where there is a GPU, else over gloo; return this rank's device.

    Where this rank sees fewer GPUs than there are ranks they share them, as if each were on a host of its own: NCCL
    refuses two ranks of one host on one GPU, and goes through sockets so.
    """
    gpus = torch.cuda.device_count()
    if not gpus:
        torch.set_num_threads(1)
        distributed.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
    torch.cuda.set_device(device)
    if gpus < int(os.environ["WORLD_SIZE"]):
        os.environ["NCCL_HOSTID"] = f"rank{os.environ['RANK']}"
    distributed.init_process_group("nccl")
    return device


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=WAYS, default="ddp")
    parser.add_argument("--delay", choices=PLACES, default="none")
    parser.add_argument("--ms", type=float, default=30.0)
    parser.add_argument("--rank", type=int, default=1, help="who is held up")
    parser.add_argument("--steps", type=int, default=78)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=26)
    parser.add_argument("--recorded", type=int, default=-1, help="say 'recorded' after so many steps")
    parser.add_argument("--into", type=Path, default=Path())
    chosen = parser.parse_args()
    device, rank = join(), distributed.get_rank()
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    delay = Delay(chosen.delay, chosen.ms / 1e3 if rank == chosen.rank else 0.0, device)
    model = parallel(Model(chosen.size, chosen.blocks, delay).to(device), chosen.way, device)
    optimizer = optimizer_with(delay, model, chosen.way)
    batch = torch.randn(chosen.batch, chosen.size)
    if device.type == "cuda":  # else the host would wait for its GPU at each copy
        batch = batch.pin_memory()
    norms = torch.empty(distributed.get_world_size(), device=device)
    steps: list[list[int]] = []
    batches = iter(DataLoader(Batches(batch, chosen.steps, delay), batch_size=None))
    for number in range(chosen.steps):
        marks = [perf_counter_ns()]
        x = next(batches).to(device, non_blocking=True)
        marks.append(perf_counter_ns())
        y = model(x)
        marks.append(perf_counter_ns())
        loss = y.square().mean()
        marks.append(perf_counter_ns())
        loss.backward()
        marks.append(perf_counter_ns())
        delay.at("collective")
        distributed.all_gather_into_tensor(norms, loss.detach().view(1))
        marks.append(perf_counter_ns())
        optimizer.step()
        marks.append(perf_counter_ns())
        optimizer.zero_grad()
        delay.at("after")
        marks.append(perf_counter_ns())
        steps.append(marks)
        if number == chosen.recorded:
            os.write(1, f"recorded {os.getpid()}\n".encode())
    if device.type == "cuda":
        torch.cuda.synchronize()
    done_ns = perf_counter_ns()
    delay.finish()
    content = {"marks": MARKS, "steps": steps, "done_ns": done_ns, "delay_ns": delay.taken_ns}
    (chosen.into / f"log{rank}.json").write_text(json.dumps(content))
    # With the model's end after the group's, torch may wait, with the GIL, for gloo's thread, which waits for the GIL.
    del model, optimizer
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
