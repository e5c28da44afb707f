"""A program whose time a known line takes, or in which one waits for the GPU: the line with the mark of its kind.

python known_lines.py loop | dataset | optimizer | cells (on a CPU too) | item | clipping | copy (on a GPU)
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

kind = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


def count_slowly():
    total = 0
    for number in range(150_000):
        total += number  # loop, dataset
    return total


class Numbers(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.full((8,), float(count_slowly() % 7))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        if kind == "item":
            self.largest = x.detach().abs().max().item()  # item
        return self.inner(x)


def clip(parameters):
    for parameter in parameters:
        if parameter.grad.norm() > 1:  # clipping
            parameter.grad.mul_(0.5)


def make_batch():
    if kind == "loop":
        count_slowly()
    batch = torch.ones(4, 8)
    return batch.cuda() if kind == "copy" else batch.to(device, non_blocking=True)  # copy


model = nn.Sequential(*(Block() for _ in range(4))).to(device)
options = {"foreach": False} if kind == "optimizer" else {}
extra = [nn.Parameter(torch.ones(1, device=device)) for _ in range(600 * (kind == "optimizer"))]
optimizer = torch.optim.Adam([*model.parameters(), *extra], lr=1e-3, **options)


def step(batch):
    loss = model(batch.to(device)).sum()
    if extra:
        loss = loss + torch.cat(extra).sum()
    loss.backward()
    if kind == "clipping":
        clip(model.parameters())
    optimizer.step()  # optimizer
    optimizer.zero_grad(set_to_none=False)


if kind == "cells":
    cell = "def waste():\n    total = 0\n    for number in range(150_000):\n        total += number\n"
    exec(compile(cell, "<ipython-input-3-0123456789ab>", "exec"))
batches = iter(DataLoader(Numbers(), 4)) if kind == "dataset" else None
for _ in range(24):
    if kind == "cells":
        waste()  # noqa: F821
    step(next(batches) if batches is not None else make_batch())
