"""A network on a graph that reads three metrics in every step; its optimizer loops over the parameters."""

import torch
import torch.nn.functional as F
from torch import nn

from machine import DEVICE, run, size

NODES, EDGES, WIDTH, LAYERS = size(30_000, 50), size(300_000, 200), size(128, 8), size(8, 1)


class Passing(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.other, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x, source, goal):
        gathered = torch.zeros_like(x).index_add_(0, goal, self.other(x)[source])
        return x + F.relu(self.norm(self.own(x) + gathered))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, WIDTH), nn.Linear(WIDTH, 10)
        self.layers = nn.ModuleList(Passing() for _ in range(LAYERS))

    def forward(self, x, source, goal):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, source, goal)
        return self.last(x)


def main(edit, steps, on_step):
    torch.set_float32_matmul_precision("high")
    model = Network().to(DEVICE)
    how = {"fused": True} if "fused" in edit else {"foreach": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **how)
    x, labels = torch.randn(NODES, 32, device=DEVICE), torch.randint(10, (NODES,), device=DEVICE)
    source, goal = torch.randint(NODES, (2, EDGES), device=DEVICE)
    history = []
    for _ in range(steps):
        logits = model(x, source, goal)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right = (logits.argmax(1) == labels).float().mean()
        history.append(right if "no-wait" in edit else right.item())  # mark: wait
        on_step()


if __name__ == "__main__":
    run(main)
