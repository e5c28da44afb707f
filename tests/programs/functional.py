"""torch.func: per-sample gradients of a module by vmap over grad, and a step of plain gradient descent by hand."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
params = {name: p.detach() for name, p in model.named_parameters()}
inputs, targets = torch.randn(12, 8, device=device), torch.randn(12, 1, device=device)


def compute_loss(params, x, y):
    prediction = functional_call(model, params, (x.unsqueeze(0),))
    return (prediction.squeeze(0) - y).square().mean()


per_sample = vmap(grad(compute_loss), in_dims=(None, 0, 0))
for step in range(8):
    grads = per_sample(params, inputs, targets)
    params = {name: p - 0.1 * grads[name].mean(0) for name, p in params.items()}
    print(step, sum(g.square().sum().item() for g in grads.values()))
