"""A compiled model. (aot_eager: the whole of Dynamo and AOTAutograd, without a C++ compiler.)"""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.relu(self.linear(self.norm(x)))


model = nn.Sequential(Block(), Block(), nn.Linear(16, 1)).to(device)
model = torch.compile(model, backend="inductor" if device == "cuda" else "aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
inputs = torch.randn(8, 16, device=device)

for step in range(6):
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
