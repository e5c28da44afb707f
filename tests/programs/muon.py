"""Muon for the matrices and AdamW for the rest, both stepped once a batch."""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                p.add_(orthogonalize(buffer), alpha=-group["lr"])


def orthogonalize(g, steps=3):
    x = g / (g.norm() + 1e-7)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 24)
        self.up = nn.Linear(24, 48)
        self.down = nn.Linear(48, 32)

    def forward(self, tokens):
        return self.down(F.relu(self.up(self.embed(tokens))).square())


model = MLP().to(device)
matrices = [model.up.weight, model.down.weight]
others = [model.embed.weight, model.up.bias, model.down.bias]
optimizers = [torch.optim.AdamW(others, lr=1e-3), Muon(matrices)]
tokens = torch.randperm(32, device=device)

for step in range(6):
    loss = F.cross_entropy(model(tokens[:-1]), tokens[1:])
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    print(step, loss.item())
