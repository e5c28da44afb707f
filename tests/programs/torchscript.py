"""A scripted model is trained; a part of it is traced for export after each step."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.features(x)))


net = Net().to(device)
model = torch.jit.script(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(4, 8, device=device)

for step in range(8):
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    exported = torch.jit.trace(net, inputs)
    print(step, loss.item(), exported(inputs).sum().item())
