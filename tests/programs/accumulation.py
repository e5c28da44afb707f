"""Three micro-batches a step, the learning rate scheduled, gradients clipped."""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 50)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
tokens = torch.randperm(50, device=device).view(5, 10)
micro_batches = 3

for step in range(6):
    total = 0.0
    for micro in range(micro_batches):
        batch = tokens[(step + micro) % 5]
        logits = model(batch[:-1])
        loss = F.cross_entropy(logits, batch[1:]) / micro_batches
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    print(step, total)
