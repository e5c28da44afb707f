"""Forward and backward of attention at several lengths: no module and no optimizer."""

import math

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


def attention(q, k, v):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    mask = torch.ones(scores.shape[-2:], device=q.device, dtype=torch.bool).tril()
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


q, k, v = (torch.randn(2, 4, 32, 16, device=device, requires_grad=True) for _ in range(3))
for i in range(8):
    o = attention(q, k, v)
    o.sum().backward()
    print(i, o.sum().item(), q.grad.sum().item())
    q.grad = k.grad = v.grad = None
