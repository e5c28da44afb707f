"""An encoder of texts that the loader cuts into words in the thread that trains."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from machine import DEVICE, run, size

WIDTH, HEADS, LAYERS, LENGTH, BATCH, WORDS = size(512, 32), size(8, 2), size(6, 1), size(256, 8), size(48, 2), 4096


class Texts(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, at):
        text = " ".join(f"w{(at * 7919 + place * 104729) % 9973}" for place in range(LENGTH))
        words = [sum(ord(letter) * 31**n for n, letter in enumerate(word)) % WORDS for word in text.split()]
        return torch.tensor(words), at % 2


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, ids):
        return self.head(self.encoder(self.words(ids)).mean(1))


def main(edit, steps, on_step):
    torch.set_float32_matmul_precision("high")
    how = {"num_workers": 4, "persistent_workers": True} if "workers:4" in edit else {}
    loader = DataLoader(Texts(), batch_size=BATCH, **how)
    model = Reader().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    done = 0
    for ids, labels in loader:
        with torch.autocast(DEVICE, torch.bfloat16, enabled="autocast" in edit):
            loss = F.cross_entropy(model(ids.to(DEVICE)), labels.to(DEVICE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        on_step()
        done += 1
        if done == steps:
            break


if __name__ == "__main__":
    run(main)
