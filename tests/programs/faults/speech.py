"""Frames of speech through convolutions, a recurrent layer and attention, with faults: ``speech.py --fault positions``.

The line of a fault is marked ``# fault: NAME``.
"""

import copy
import io
import json
import math
import time

import numpy as np
import torch
from settings import Settings, compile_if_asked, main
from torch import nn
from torch.nn import functional as F


def make_positions(length, width, device="cpu"):
    at = torch.arange(length, device=device)[:, None]
    rates = torch.exp(torch.arange(0, width, 2, device=device) * (-math.log(10_000.0) / width))
    return torch.stack((torch.sin(at * rates), torch.cos(at * rates)), -1).flatten(1)


class Recurrence(nn.Module):
    """A GRU, as cuDNN's or one cell after another."""

    def __init__(self, width, unrolled):
        super().__init__()
        self.unrolled = unrolled
        self.gru = nn.GRUCell(width, width) if unrolled else nn.GRU(width, width, batch_first=True)

    def forward(self, x):
        if not self.unrolled:
            return self.gru(x)[0]
        state, states = torch.zeros_like(x[:, 0]), []
        for at in range(x.shape[1]):
            state = self.gru(x[:, at], state)  # fault: unrolled
            states.append(state)
        return torch.stack(states, 1)


class Layer(nn.Module):
    def __init__(self, width, faults):
        super().__init__()
        self.heads, self.checks = width // 64 or 1, "nan-check" in faults
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, x, padded):
        batch, length, width = x.shape
        q, k, v = self.inputs(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=padded)
        x = x + self.output(y.transpose(1, 2).reshape(batch, length, width))
        x = x + self.wide(self.norm_2(x))
        if self.checks and torch.isnan(x).any():  # fault: nan-check
            raise ValueError("the loss is not a number")
        return x


class Recognizer(nn.Module):
    def __init__(self, sizes, faults):
        super().__init__()
        width = sizes["width"]
        self.faults = faults
        self.front = nn.Sequential(
            nn.Conv1d(80, width, 5, 2, 2), nn.SiLU(), nn.Conv1d(width, width, 5, 2, 2), nn.SiLU()
        )
        self.recurrence = Recurrence(width, "unrolled" in faults)
        self.layers = nn.ModuleList(Layer(width, faults) for _ in range(sizes["layers"]))
        self.head = nn.Linear(width, sizes["letters"])
        self.register_buffer("positions", make_positions(sizes["frames"] // 4, width))

    def forward(self, frames, padded):
        x = self.front(frames).transpose(1, 2)
        if "positions" in self.faults:
            x = x + make_positions(x.shape[1], x.shape[2]).to(x.device)  # fault: positions
        else:
            x = x + self.positions
        x = self.recurrence(x)
        for layer in self.layers:
            x = layer(x, padded)
        return self.head(x)


def mask_frames(batch, frames):
    mask = np.ones((batch, 80, frames), dtype=np.float32)
    for row in range(batch):
        for _ in range(40):
            start = np.random.randint(0, frames - frames // 10)  # fault: numpy-mask
            mask[row, :, start : start + frames // 10] = 0  # fault: numpy-mask
    return mask


def read_records(lines):
    return [sum(json.loads(line)["durations"]) for line in lines]  # fault: json


def make_step(settings: Settings):
    """Return a function that makes one training step."""
    faults, device = settings.faults, settings.device
    sizes = {"width": 512, "layers": 8, "letters": 512, "frames": 1024, "batch": 32}
    if settings.tiny:
        sizes = {"width": 32, "layers": 2, "letters": 64, "frames": 64, "batch": 2}
    batch, length = sizes["batch"], sizes["frames"] // 4
    torch.manual_seed(0)
    model = Recognizer(sizes, faults).to(device)
    average = copy.deepcopy(model).requires_grad_(False)
    compile_if_asked(model, faults)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))
    frames = torch.randn(batch, 80, sizes["frames"], device=device)
    letters = torch.randint(0, sizes["letters"], (batch, length), device=device)
    lengths = torch.randint(length // 2, length, (batch,), device=device)
    heard = torch.arange(length, device=device)[None] < lengths[:, None]
    lines = [json.dumps({"durations": list(range(100))}) for _ in range(4 if settings.tiny else 200)]
    losses, seen, count = [], 0.0, 0

    def keep_books(logits, loss):
        nonlocal seen
        if "average" in faults:
            for kept, now in zip(average.parameters(), model.parameters(), strict=True):
                kept.mul_(0.999).add_(now.detach(), alpha=0.001)  # fault: average
        if "average-at-once" in faults:
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.001)
        if "accuracy" in faults:
            best = logits.detach().argmax(-1).cpu().numpy()  # fault: accuracy
            seen += float((best == letters.cpu().numpy()).mean())  # fault: accuracy
        if "reads" in faults:
            seen += loss.item()  # fault: reads
        if "history" in faults:
            losses.append(logits.float())  # fault: history
        if "empty-cache" in faults and device == "cuda":
            torch.cuda.empty_cache()  # fault: empty-cache
        if "saves" in faults and count % 5 == 0:
            torch.save(model.state_dict(), io.BytesIO())  # fault: saves

    def step():
        nonlocal seen, count
        count += 1
        torch.set_float32_matmul_precision("highest" if "fp32" in faults else "high")
        inputs = frames
        if "numpy-mask" in faults:
            inputs = inputs * torch.from_numpy(mask_frames(batch, sizes["frames"])).to(device)  # fault: numpy-mask
        if "json" in faults:
            seen += sum(read_records(lines))
        is_half = not {"fp32", "no-autocast"} & faults
        with torch.autocast(device, dtype=torch.bfloat16, enabled=is_half):
            logits = model(inputs, heard[:, None, None, :])
        if "sync" in faults:
            torch.cuda.synchronize() if device == "cuda" else None  # fault: sync
            began = time.perf_counter()
        if "select" in faults:
            loss = F.cross_entropy(logits[heard].float(), letters[heard])  # fault: select
        else:
            each = F.cross_entropy(logits.flatten(0, 1).float(), letters.flatten(), reduction="none")
            loss = (each * heard.flatten()).sum() / lengths.sum()
        optimizer.zero_grad(set_to_none="zeroed" not in faults)
        loss.backward()
        if "sync" in faults:
            torch.cuda.synchronize() if device == "cuda" else None  # fault: sync
            seen += time.perf_counter() - began
        if "clip-loop" in faults or "clip-fused" in faults:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach="clip-fused" in faults)  # fault: clip-loop
        if "norms" in faults:
            seen += sum(p.grad.norm().item() for p in model.parameters())  # fault: norms
        optimizer.step()
        schedule.step()
        keep_books(logits, loss)

    return step


if __name__ == "__main__":
    main(make_step)
