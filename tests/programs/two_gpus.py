"""A model whose first half lies on one GPU and whose second half on another, in one process."""

import torch
from torch import nn

torch.manual_seed(0)


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to("cuda:0")
        self.second = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 10)).to("cuda:1")

    def forward(self, x):
        return self.second(self.first(x).to("cuda:1"))


model = Halves()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
inputs, labels = torch.randn(64, 256, device="cuda:0"), (torch.arange(64) % 10).to("cuda:1")

for step in range(6):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    print(step, loss.item())
