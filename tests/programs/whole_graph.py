"""A whole training step captured into one CUDA graph, then replayed. Needs a GPU."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=True)
inputs, targets = torch.randn(32, 64, device="cuda"), torch.randn(32, 64, device="cuda")


def train():
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        train()
torch.cuda.current_stream().wait_stream(side)

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = train()

for step in range(12):
    inputs.copy_(torch.randn(32, 64))
    graph.replay()
    print(step, loss.item())
