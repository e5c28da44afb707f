"""Bags of words through a wide network, in a plain loop, with faults: ``plain.py --fault mask``."""

import torch
from settings import Settings, compile_if_asked, main
from torch import nn
from torch.nn import functional as F


class Words(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.words = nn.EmbeddingBag(1000, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, bags):
        return self.head(self.layers(self.words(bags)))


def make_mask(rows, length):
    mask = []
    for row in range(rows):
        mask.append([at <= row % length for at in range(length)])  # fault: mask
    return mask


def make_step(settings: Settings):
    """Return a function that makes one training step."""
    faults, device = settings.faults, settings.device
    rows, length, width = (8, 4, 16) if settings.tiny else (4096, 16, 1024)
    vocabulary = 512 if settings.tiny else 50_304
    vocabulary -= 47 if "sizes" in faults else 0
    torch.manual_seed(0)
    model = Words(vocabulary, width).to(device)
    compile_if_asked(model, faults)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=device == "cuda")
    bags = torch.randint(0, 1000, (rows, length), device=device)
    labels = torch.randint(0, vocabulary, (rows,), device=device)
    ready = torch.tensor(make_mask(rows, length), device=device)
    confident = 0.0

    def step():
        nonlocal confident
        mask = ready
        if "mask" in faults:
            mask = torch.tensor(make_mask(rows, length)).to(device)  # fault: mask
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(bags * mask)
        loss = F.cross_entropy(logits.float(), labels)
        loss.backward()
        if "metrics" in faults:
            best = logits.detach().float().softmax(-1).max(-1).values.cpu()  # fault: metrics
            confident += float(best.numpy().mean())
        elif "metrics-on-gpu" in faults:
            confident += logits.detach().float().softmax(-1).max(-1).values.mean()
        optimizer.step()
        optimizer.zero_grad(set_to_none="zeroed" not in faults)

    return step


if __name__ == "__main__":
    main(make_step)
