"""LBFGS, which calls a closure with a forward and a backward pass several times a step."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
optimizer = torch.optim.LBFGS(
    model.parameters(), lr=0.1, max_iter=3, history_size=2, tolerance_grad=0, tolerance_change=0
)
inputs = torch.randn(16, 4, device=device)
targets = inputs.sum(1, keepdim=True)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    return loss


for step in range(6):
    print(step, optimizer.step(closure).item())
