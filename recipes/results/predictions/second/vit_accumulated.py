"""A vision transformer in fp32 that sums the gradients of two batches."""

import torch
import torch.nn.functional as F
from torch import nn

from machine import DEVICE, run, size

WIDTH, HEADS, LAYERS, SIDE, BATCH = size(512, 32), size(8, 2), size(8, 1), size(160, 16), size(24, 2)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 8, stride=8)
        self.places = nn.Parameter(torch.zeros(1, (SIDE // 8) ** 2, WIDTH))
        self.encoders = nn.ModuleList(Encoder() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for encoder in self.encoders:
            x = encoder(x)
        return self.head(x.mean(1))


def main(edit, steps, on_step):
    torch.set_float32_matmul_precision("high" if "tf32" in edit else "highest")
    model = ViT().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    images = torch.randn(2, BATCH, 3, SIDE, SIDE, device=DEVICE)
    labels = torch.randint(100, (2, BATCH), device=DEVICE)
    for _ in range(steps):
        optimizer.zero_grad()
        for part in range(2):
            with torch.autocast(DEVICE, torch.bfloat16, enabled="autocast" in edit):
                loss = F.cross_entropy(model(images[part]), labels[part]) / 2
            loss.backward()
        optimizer.step()
        on_step()


if __name__ == "__main__":
    run(main)
