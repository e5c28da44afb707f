"""A trained model asked for its predictions, batch by batch, without gradients."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
model = model.to(device).eval()

with torch.no_grad():
    for i in range(8):
        images = torch.randn(4, 1, 8, 8, device=device)
        scores = model(images).softmax(-1)
        print(i, scores.max().item(), scores.argmax(-1).tolist())
