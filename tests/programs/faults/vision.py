"""A convolutional network that reads images from a DataLoader, with faults: ``vision.py --fault no-workers``."""

import itertools
import os

import torch
from settings import Settings, compile_if_asked, main
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

AHEAD = 4
"""Batches that each worker makes ahead."""


class Images(Dataset):
    """Images made up by index; ``work`` is how often one is blurred. Twelve workers keep up with an H200."""

    def __init__(self, size, work):
        self.size, self.work = size, work

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        image = torch.full((3, self.size, self.size), float(index % 255))
        for _ in range(self.work):
            image[:1, ::2, ::2] = F.avg_pool2d(image[None, :1], 3, 2, 1)[0] + 0.01  # fault: no-workers one-worker
        return image / 255, index % 10


class Stage(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.conv_1, self.norm_1 = nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after)
        self.conv_2, self.norm_2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)

    def forward(self, x):
        x = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(x + self.norm_2(self.conv_2(x)))


class Network(nn.Module):
    def __init__(self, width):
        super().__init__()
        widths = [3, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.Sequential(*(Stage(a, b) for a, b in itertools.pairwise(widths)))
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x):
        return self.head(self.stages(x).mean((2, 3)))


def use_all_threads(_):
    torch.set_num_threads(len(os.sched_getaffinity(0)))


def count_workers(settings: Settings):
    if "no-workers" in settings.faults:
        return 0
    return 1 if settings.tiny or "one-worker" in settings.faults else 12


def count_ready_batches(settings: Settings):
    """Return how many batches workers make ahead of the step."""
    return AHEAD * count_workers(settings)


def make_step(settings: Settings):
    """Return a function that makes one training step."""
    faults, device = settings.faults, settings.device
    size, batch, width, work = (16, 4, 4, 1) if settings.tiny else (192, 96, 96, 1)
    torch.manual_seed(0)
    layout = torch.contiguous_format if "layout" in faults else torch.channels_last
    model = Network(width).to(device, memory_format=layout)
    compile_if_asked(model, faults)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=device == "cuda")
    workers = count_workers(settings)
    loader = DataLoader(
        Images(size, work),
        batch_size=batch,
        num_workers=workers,
        pin_memory=device == "cuda" and "pageable" not in faults,
        persistent_workers=workers > 0,
        worker_init_fn=use_all_threads if "threads" in faults else None,
        prefetch_factor=AHEAD if workers else None,
    )
    batches = iter(loader)
    total = 0.0

    def step():
        nonlocal total
        torch.autograd.set_detect_anomaly("anomaly" in faults)
        torch.backends.cudnn.benchmark = "benchmark" in faults
        images, labels = next(batches)
        images = images.to(device, memory_format=layout, non_blocking="pageable" not in faults)  # fault: pageable
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if "log" in faults:
            total += loss.item()  # fault: log

    return step


if __name__ == "__main__":
    main(make_step)
