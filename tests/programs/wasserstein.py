"""A Wasserstein GAN: the critic's loss is the difference of two passes, its weights are clipped after each step."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 8)).to(device)
critic = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)).to(device)
optimizer_g = torch.optim.RMSprop(generator.parameters(), lr=5e-5)
optimizer_c = torch.optim.RMSprop(critic.parameters(), lr=5e-5)

for step in range(6):
    real = torch.randn(16, 8, device=device) + 1
    fake = generator(torch.randn(16, 4, device=device))
    loss_c = critic(fake.detach()).mean() - critic(real).pow(2).mean().sqrt()
    optimizer_c.zero_grad()
    loss_c.backward()
    optimizer_c.step()
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.clamp_(-0.1, 0.1)

    loss_g = -critic(fake).mean()
    optimizer_g.zero_grad()
    loss_g.backward()
    optimizer_g.step()
    print(step, loss_c.item(), loss_g.item())
