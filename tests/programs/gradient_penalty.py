"""A critic whose input gradient is held near one: torch.autograd.grad within the loss."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

critic = nn.Sequential(nn.Linear(8, 32), nn.Softplus(), nn.Linear(32, 1)).to(device)
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
real, fake = torch.randn(2, 16, 8, device=device)

for step in range(6):
    mix = torch.rand(16, 1, device=device)
    between = (mix * real + (1 - mix) * fake).requires_grad_(True)
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
