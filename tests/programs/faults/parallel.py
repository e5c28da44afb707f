"""The language model on several ranks, with faults: ``torchrun --nproc-per-node 4 parallel.py --fault late-python``.

With ``--times FILE`` rank 0 writes how long each of the last steps took in ms, and nothing is recorded.
"""

import json
import os
import time
from itertools import pairwise
from pathlib import Path

import torch
from settings import Settings, read_settings
from torch import distributed
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformer import Model

LATE = 1
"""The rank that most faults are on."""


def count_slowly(rounds):
    total = 0
    for number in range(rounds):
        total += number * number % 7  # fault: late-python
    return total


def make_step(settings: Settings, rank: int, device: torch.device):
    """Return a function that makes one training step of two passes."""
    faults = settings.faults
    sizes = {"vocabulary": 8192, "width": 768, "heads": 12, "blocks": 8, "batch": 8, "length": 512}
    if settings.tiny:
        sizes = {"vocabulary": 512, "width": 32, "heads": 2, "blocks": 2, "batch": 4, "length": 16}
    is_late = rank == LATE
    rows = sizes["batch"] * (2 if "uneven" in faults and is_late else 1)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = DistributedDataParallel(
        Model(sizes, frozenset()).to(device),
        bucket_cap_mb=0.05 if "small-buckets" in faults else None,
        find_unused_parameters="unused" in faults,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    tokens = torch.randint(0, 500, (rows, sizes["length"] + 1), device=device)
    noise = 1 << (10 if settings.tiny else 22)
    seen = 0.0

    def backward():
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(logits, tokens[:, 1:].reshape(-1))
        loss.backward()
        return loss

    def step():
        nonlocal seen
        if "late-python" in faults and is_late:
            seen += count_slowly(1000 if settings.tiny else 150_000)
        if "late-data" in faults and is_late:
            seen += torch.randn(noise).to(device)[0]  # fault: late-data
        if "always-sums" in faults:
            backward()
        else:
            with model.no_sync():
                backward()
        loss = backward()
        optimizer.step()
        optimizer.zero_grad()
        if "mean-loss" in faults:
            distributed.all_reduce(loss.detach())
            seen += loss.item()  # fault: mean-loss
        if "first-writes" in faults and rank == 0:
            Path(os.devnull).write_text(json.dumps([[at] * 10 for at in range(20_000)]))  # fault: first-writes

    return step


def measure(step, device, steps):
    """Return what each step took in ms on this rank's GPU, or on its CPU."""
    if device.type != "cuda":
        marks = [time.perf_counter() for _ in range(steps) if step() is None]
        return [(after - before) * 1e3 for before, after in pairwise(marks)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps)]
    for mark in marks:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(marks)]


def main():
    settings, times = read_settings()
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpus else "gloo")
    step = make_step(settings, distributed.get_rank(), device)
    if times is None:
        for _ in range(settings.steps):
            step()
    else:
        for _ in range(settings.steps // 3):
            step()
        measured = measure(step, device, settings.steps)
        if distributed.get_rank() == 0:
            times.write_text(json.dumps(measured))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
