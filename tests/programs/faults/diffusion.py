"""A U-Net that learns to remove noise from images, with faults: ``diffusion.py --fault swish``.

The line of a fault is marked ``# fault: NAME``.
"""

import copy
import itertools
import math

import torch
from settings import Settings, compile_if_asked, main
from torch import nn
from torch.nn import functional as F

TIMES = 1000
"""How many steps lead from an image to noise."""


class WrittenSwish(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


class Residual(nn.Module):
    def __init__(self, before, after, embedding, faults):
        super().__init__()
        groups = 32 if after >= 128 else 4
        self.norm_1, self.conv_1 = nn.GroupNorm(groups, before), nn.Conv2d(before, after, 3, padding=1)
        self.norm_2, self.conv_2 = nn.GroupNorm(groups, after), nn.Conv2d(after, after, 3, padding=1)
        self.time = nn.Linear(embedding, after)
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1)
        self.activation = WrittenSwish() if "swish" in faults else nn.SiLU()

    def forward(self, x, time):
        y = self.conv_1(self.activation(self.norm_1(x)))
        y = y + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv_2(self.activation(self.norm_2(y)))


class Attention(nn.Module):
    def __init__(self, width, faults):
        super().__init__()
        self.heads, self.upcast = width // 64 or 1, "upcast" in faults
        self.norm = nn.GroupNorm(4, width)
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, width, high, wide = x.shape
        y = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.inputs(y).view(batch, high * wide, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.upcast:
            with torch.autocast(x.device.type, enabled=False):
                q, k, v = q.float(), k.float(), v.float()
                y = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        y = self.output(y.transpose(1, 2).reshape(batch, high * wide, width))
        return x + y.transpose(1, 2).reshape(x.shape)


class Level(nn.Module):
    """Two residual blocks of one resolution, with attention at the lowest."""

    def __init__(self, widths, after, embedding, attends, faults):
        super().__init__()
        self.blocks = nn.ModuleList(Residual(width, after, embedding, faults) for width in widths)
        self.attention = nn.ModuleList(Attention(after, faults) if attends else nn.Identity() for _ in widths)

    def forward(self, x, time, skips=()):
        outputs = []
        for number, (block, attention) in enumerate(zip(self.blocks, self.attention, strict=True)):
            x = torch.cat((x, skips[number]), 1) if skips else x
            x = attention(block(x, time))
            outputs.append(x)
        return x, outputs


class UNet(nn.Module):
    def __init__(self, sizes, faults):
        super().__init__()
        widths, embedding = sizes["widths"], sizes["embedding"]
        self.embedding, self.faults = embedding, faults
        self.register_buffer("rates", torch.exp(torch.arange(embedding // 2) * (-math.log(10_000.0) / embedding * 2)))
        self.time = nn.Sequential(nn.Linear(embedding, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        self.first = nn.Conv2d(3, widths[0], 3, padding=1)
        pairs = itertools.pairwise([widths[0], *widths])
        self.down = nn.ModuleList(Level((a, b), b, embedding, b == widths[-1], faults) for a, b in pairs)
        self.shrink = nn.ModuleList(nn.Conv2d(width, width, 3, 2, 1) for width in widths[:-1])
        self.middle = Level((widths[-1], widths[-1]), widths[-1], embedding, True, faults)
        self.up = nn.ModuleList(Level((2 * a, 2 * a), a, embedding, a == widths[-1], faults) for a in widths)
        self.grow = nn.ModuleList(nn.Conv2d(b, a, 3, padding=1) for a, b in itertools.pairwise(widths))
        self.norm, self.last = nn.GroupNorm(4, widths[0]), nn.Conv2d(widths[0], 3, 3, padding=1)

    def embed(self, times):
        if "embedding" in self.faults:
            rows, rates = [], [10_000.0 ** (-2 * at / self.embedding) for at in range(self.embedding // 2)]
            for time in times.tolist():  # fault: embedding
                rows.append([f(time * rate) for f in (math.sin, math.cos) for rate in rates])  # fault: embedding
            return torch.tensor(rows, device=times.device)  # fault: embedding
        angles = times[:, None] * self.rates
        return torch.cat((angles.sin(), angles.cos()), 1)

    def forward(self, x, times):
        time = F.silu(self.time(self.embed(times)))
        x, skips = self.first(x), []
        for number, level in enumerate(self.down):
            x, outputs = level(x, time)
            skips.append(outputs)
            x = self.shrink[number](x) if number < len(self.shrink) else x
        x, _ = self.middle(x, time)
        for number in reversed(range(len(self.up))):
            x, _ = self.up[number](x, time, skips[number])
            x = self.grow[number - 1](F.interpolate(x, scale_factor=2)) if number else x
        return self.last(F.silu(self.norm(x)))


def add_noise(remaining, images, noise, times):
    """Return noisy images; ``remaining`` says how much of an image remains after each time."""
    share = remaining.gather(0, times.to(remaining.device)).to(images.device)[:, None, None, None]
    return share.sqrt() * images + (1 - share).sqrt() * noise


@torch.no_grad()
def update_average(kept, now, faults):
    if "average-on-cpu" not in faults:
        torch._foreach_lerp_(kept, now, 0.001)
        return
    for mean, weight in zip(kept, now, strict=True):
        mean.lerp_(weight.cpu(), 0.001)  # fault: average-on-cpu


def make_step(settings: Settings):
    """Return a function that makes one training step."""
    faults, device = settings.faults, settings.device
    sizes = {"widths": (128, 256, 512), "embedding": 512, "batch": 24, "side": 64, "images": 4096}
    if settings.tiny:
        sizes = {"widths": (8, 16, 32), "embedding": 16, "batch": 8, "side": 8, "images": 16}
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = UNet(sizes, faults).to(device, memory_format=torch.channels_last)
    average = copy.deepcopy(model).requires_grad_(False).to("cpu" if "average-on-cpu" in faults else device)
    kept, now = list(average.parameters()), list(model.parameters())
    remaining = torch.cumprod(1 - torch.linspace(1e-4, 0.02, TIMES), 0).to("cpu" if "schedule" in faults else device)
    compile_if_asked(model, faults)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=device == "cuda")
    pool = torch.randint(0, 256, (sizes["images"], 3, sizes["side"], sizes["side"]), dtype=torch.uint8, device=device)
    passes = 8 if "eight-passes" in faults else 4 if "four-passes" in faults else 1
    logs = [[0.0, 0.0, 0] for _ in range(4)]

    def learn(images):
        images = (images / 127.5 - 1).contiguous(memory_format=torch.channels_last)
        noise = torch.randn_like(images)
        times = torch.randint(0, TIMES, (len(images),), device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            predicted = model(add_noise(remaining, images, noise, times), times)
        each = F.mse_loss(predicted.float(), noise, reduction="none").mean((1, 2, 3))
        loss = each.mean()
        if "decay" in faults:
            loss = loss + 1e-6 * sum(weight.pow(2).sum() for weight in now)  # fault: decay
        (loss / passes).backward()
        return predicted.detach(), each.detach(), times

    def log_quartiles(predicted, each, times):
        for image, loss, time in zip(predicted, each, times, strict=True):
            log = logs[time.item() * 4 // TIMES]  # fault: quartiles
            log[0] += loss.item()  # fault: quartiles
            log[1] += image.float().std().item()  # fault: quartiles
            log[2] += 1

    def step():
        images = pool[torch.randint(0, len(pool), (sizes["batch"],), device=device)]
        for part in images.chunk(passes):
            results = learn(part)
            if "quartiles" in faults:
                log_quartiles(*results)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        update_average(kept, now, faults)

    return step


if __name__ == "__main__":
    main(make_step)
