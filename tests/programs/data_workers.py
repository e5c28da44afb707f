"""Epochs over a DataLoader with a worker, whose queue of one batch is soon as full as it will ever be."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        x = torch.full((8,), float(index)) / 24
        return x, x.square().sum()


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(
        Squares(), batch_size=4, shuffle=True, num_workers=1, prefetch_factor=1, pin_memory=device == "cuda"
    )
    for epoch in range(2):
        for batch in loader:
            inputs, targets = [part.to(device, non_blocking=True) for part in batch]
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs).squeeze(1), targets)
            loss.backward()
            optimizer.step()
            print(epoch, loss.item())


if __name__ == "__main__":
    main()
