"""A language model in a plain loop, with one fault or several: ``transformer.py --fault item --fault gelu``.

The line of a fault is marked ``# fault: NAME``.
"""

import gc
import math

import torch
from settings import Settings, compile_if_asked, main
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    def __init__(self, width, heads, written):
        super().__init__()
        self.heads, self.written = heads, written
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.inputs(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.written:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            y = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(y.transpose(1, 2).reshape(batch, length, width))


class WrittenGelu(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3))))


class WrittenNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-5) * self.weight + self.bias


class Gate(nn.Module):
    """A factor for the block's output, summed up from 60 numbers, one by one if ``looped``."""

    def __init__(self, looped):
        super().__init__()
        self.looped, self.parts = looped, nn.Parameter(torch.zeros(60))

    def forward(self, x):
        if not self.looped:
            return x * (1 + 0.01 * self.parts.sum())
        total = torch.zeros((), device=x.device)
        for part in self.parts:
            total = total + 0.01 * part  # fault: loop
        return x * (1 + total)


class Block(nn.Module):
    def __init__(self, width, heads, faults):
        super().__init__()
        norm = WrittenNorm if "norm" in faults else nn.LayerNorm
        self.norm_1, self.norm_2 = norm(width), norm(width)
        self.attention = Attention(width, heads, "attention" in faults)
        activation = WrittenGelu() if "gelu" in faults else nn.GELU(approximate="tanh")
        self.mlp = nn.ModuleDict(
            {"up": nn.Linear(width, 4 * width), "activation": activation, "down": nn.Linear(4 * width, width)}
        )
        self.gate = Gate("loop" in faults)
        self.reads = "item" in faults
        self.seen = 0.0

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        y = self.mlp["down"](self.mlp["activation"](self.mlp["up"](self.norm_2(x))))
        if self.reads:
            self.seen = y.mean().item()  # fault: item
        return x + self.gate(y)


class Model(nn.Module):
    def __init__(self, sizes, faults):
        super().__init__()
        vocabulary = sizes["vocabulary"] - (47 if "sizes" in faults else 0)
        self.tokens = nn.Embedding(vocabulary, sizes["width"])
        self.blocks = nn.ModuleList(Block(sizes["width"], sizes["heads"], faults) for _ in range(sizes["blocks"]))
        self.norm = nn.LayerNorm(sizes["width"])
        self.head = nn.Linear(sizes["width"], vocabulary)
        self.checkpoints = "checkpoint" in faults

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(self.norm(x))  # fault: keep


def written_cross_entropy(logits, targets):
    shifted = logits - logits.max(-1, keepdim=True).values
    log_sums = shifted.exp().sum(-1).log()
    return (log_sums - shifted.gather(-1, targets[:, None]).squeeze(-1)).mean()


def python_batch(sizes, number):
    rows = []
    for row in range(sizes["batch"]):
        rows.append([(row * 7 + at * 13 + number) % 1000 for at in range(sizes["length"])])  # fault: python-batch
    return torch.tensor(rows)  # fault: python-batch


class Record:
    """Refers to its neighbour, which refers to it: nothing but the garbage collector frees them."""

    def __init__(self):
        self.other = None


def make_records(count):
    records = [Record() for _ in range(count)]
    for record, other in zip(records, reversed(records), strict=True):
        record.other = other
    return records


def scale(loss, name):  # fault: recompiles
    return loss * (1 if name else 2)


def make_step(settings: Settings):
    """Return a function that makes one training step."""
    faults, device = settings.faults, settings.device
    sizes = {"vocabulary": 8192, "width": 768, "heads": 12, "blocks": 8, "batch": 8, "length": 512}
    if settings.tiny:
        sizes = {"vocabulary": 2048, "width": 32, "heads": 2, "blocks": 2, "batch": 2, "length": 16}
    if "small-batch" in faults:
        sizes["batch"] //= 8 if not settings.tiny else 2
    if "doubled" in faults:
        sizes["batch"] *= 2
    torch.manual_seed(0)
    model = Model(sizes, faults).to(device)
    compile_if_asked(model, faults)
    kind = {"for-loop": {"foreach": False}, "foreach": {}}
    chosen = next((kind[name] for name in kind if name in faults), {"fused": True})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **chosen)
    tokens = torch.randint(0, 1000, (sizes["batch"], sizes["length"] + 1), device=device)
    noise_size = 1 << (10 if settings.tiny else 24)
    kept, records, count = [], [], 0
    compiled_scale = scale
    if "recompiles" in faults or "compiles-once" in faults:
        torch._dynamo.config.recompile_limit = 1000
        compiled_scale = torch.compile(scale, backend="eager", dynamic=False)

    def step():
        nonlocal count, records
        count += 1
        torch.set_float32_matmul_precision("highest" if "fp32" in faults else "high")
        torch.autograd.set_detect_anomaly("anomaly" in faults)
        torch.use_deterministic_algorithms("deterministic" in faults, warn_only=True)
        inputs, targets = tokens[:, :-1], tokens[:, 1:].reshape(-1)
        if "python-batch" in faults:
            inputs = python_batch(sizes, count).to(device)
        if "random" in faults:
            noise = torch.randn(noise_size)  # fault: random
            inputs = inputs + (noise.to(device)[: sizes["length"]] > 9).long()
        logits = model(inputs).flatten(0, 1)
        loss = (written_cross_entropy if "cross-entropy" in faults else F.cross_entropy)(logits, targets)
        if "recompiles" in faults or "compiles-once" in faults:
            loss = compiled_scale(loss, f"step {count}" if "recompiles" in faults else "step")
        loss.backward()
        if "frozen" in faults:
            gc.disable()
        if "records" in faults:
            records = make_records(100_000)
        if "collect" in faults:
            gc.collect()  # fault: collect
        if "clip" in faults or "clip-on-gpu" in faults:
            norms = [parameter.grad.norm() for parameter in model.parameters()]
            if "clip" in faults:
                norms = [norm.item() for norm in norms]  # fault: clip
            limit = sum(norms)
            for parameter in model.parameters():
                parameter.grad.div_(limit + 1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if "keep" in faults:
            kept.append(logits)
        if "frozen" in faults:
            gc.freeze()  # what other variants in this process collect must not be this one's records
            gc.enable()

    return step


if __name__ == "__main__":
    main(make_step)
