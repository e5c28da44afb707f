"""DataParallel over two GPUs."""

import torch
from torch import nn

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.linear = nn.Linear(256, 256)

    def forward(self, x):
        return x + self.linear(self.norm(x)).relu()


model = nn.DataParallel(nn.Sequential(Block(), Block(), nn.Linear(256, 10)).cuda(), device_ids=[0, 1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, labels = torch.randn(64, 256).cuda(), (torch.arange(64) % 10).cuda()

for step in range(6):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    print(step, loss.item())
