"""An average of the weights kept beside the model, and a validation pass after every step."""

import copy

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1)).to(device)
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
criterion = nn.MSELoss()
inputs, targets = torch.randn(16, 8, device=device), torch.randn(16, 1, device=device)


@torch.no_grad()
def update_average(decay=0.9):
    for kept, current in zip(average.parameters(), model.parameters(), strict=True):
        kept.lerp_(current, 1 - decay)


@torch.inference_mode()
def validate():
    model.eval()
    loss = criterion(average(inputs), targets)
    model.train()
    return loss.item()


for epoch in range(6):
    optimizer.zero_grad()
    loss = criterion(model(inputs), targets)
    loss.backward()
    optimizer.step()
    update_average()
    print(epoch, loss.item(), validate())
