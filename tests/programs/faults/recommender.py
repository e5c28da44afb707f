"""A model that predicts clicks from categories and numbers, read from a DataLoader, with faults.

``recommender.py --fault pairs``; the line of a fault is marked ``# fault: NAME``.
"""

import hashlib
import itertools
from collections import Counter

import numpy as np
import torch
from settings import Settings, compile_if_asked, main
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

NUMBERS = 13
"""Features that are numbers; the others are categories, each with a table of vectors."""
AHEAD = 2
"""Batches that each worker makes ahead."""


def place_by_hash(values, column, rows):
    """Return the rows of a table at which values of a category have their vectors."""
    return [int(hashlib.md5(f"{column}={value}".encode()).hexdigest(), 16) % rows for value in values]  # fault: hash


class Clicks(Dataset):
    """Whole batches made up by index: twelve workers keep up with an H200."""

    def __init__(self, rows, batch, faults):
        self.rows, self.batch, self.faults = np.array(rows), batch, faults

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        random = np.random.default_rng(index)
        # some values are far more frequent than others
        values = np.square(random.random((self.batch, len(self.rows)), dtype=np.float32))
        values = (np.square(values) * (1 << 30)).astype(np.int64)
        if "hash" in self.faults:
            columns = [place_by_hash(values[:, at].tolist(), at, rows) for at, rows in enumerate(self.rows.tolist())]
            places = np.array(columns, dtype=np.int32).T.copy()
        else:
            places = (values * 2654435761 % (1 << 31) % self.rows).astype(np.int32)
        numbers = np.log1p(random.exponential(10.0, (self.batch, NUMBERS))).astype(np.float32)
        clicked = (random.random(self.batch) < 0.25).astype(np.float32)
        return torch.from_numpy(places), torch.from_numpy(numbers), torch.from_numpy(clicked)


class Tables(nn.Module):
    """A vector for each category: all tables in one, or one table each."""

    def __init__(self, rows, width, apart):
        super().__init__()
        self.apart = apart
        starts = torch.tensor([0, *rows[:-1]]).cumsum(0)
        self.register_buffer("starts", starts.int())
        self.tables = nn.ModuleList(nn.Embedding(count, width) for count in (rows if apart else [sum(rows)]))

    def forward(self, places):
        if not self.apart:
            return self.tables[0](places + self.starts)
        vectors = []
        for column, table in enumerate(self.tables):
            vectors.append(table(places[:, column]))
        return torch.stack(vectors, 1)


class Interaction(nn.Module):
    """The inner products of all pairs of vectors."""

    def __init__(self, count, by_pairs):
        super().__init__()
        self.by_pairs = by_pairs
        left, right = torch.tril_indices(count, count, -1)
        self.register_buffer("chosen", left * count + right)

    def forward(self, vectors):
        if not self.by_pairs:
            return (vectors @ vectors.transpose(1, 2)).flatten(1).index_select(1, self.chosen)
        products = []
        for left in range(vectors.shape[1]):
            for right in range(left):
                products.append((vectors[:, left] * vectors[:, right]).sum(-1))
        return torch.stack(products, 1)


def make_layers(*widths):
    layers = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers)


class Recommender(nn.Module):
    def __init__(self, rows, width, hidden, faults):
        super().__init__()
        count = len(rows) + 1
        pairs = count * (count - 1) // 2
        self.padding = -(width + pairs) % 8  # tensor cores want rows of whole 16 bytes
        self.tables = Tables(rows, width, "tables" in faults)
        self.bottom = make_layers(NUMBERS, hidden // 4, hidden // 8, width)
        self.interaction = Interaction(count, "pairs" in faults)
        self.top = make_layers(width + pairs + self.padding, hidden, hidden, hidden // 2)
        self.head = nn.Linear(hidden // 2, 1)

    def forward(self, places, numbers):
        dense = self.bottom(numbers)
        vectors = torch.cat((dense[:, None], self.tables(places).to(dense.dtype)), 1)
        x = torch.cat((dense, self.interaction(vectors)), 1)
        return self.head(self.top(F.pad(x, (0, self.padding)))).squeeze(1)


def written_loss(logits, clicked):
    chance = torch.sigmoid(logits)
    return -(clicked * torch.log(chance + 1e-7) + (1 - clicked) * torch.log(1 - chance + 1e-7)).mean()


def measure_area(logits, clicked):
    """Return the area under the curve of true against false alarms, from the ranks of those who clicked."""
    scores, clicked = logits.detach().float().cpu().numpy(), clicked.cpu().numpy()  # fault: area
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)  # fault: area
    count = clicked.sum()
    return float((ranks[clicked > 0].sum() - count * (count + 1) / 2) / max(count * (len(scores) - count), 1))


def count_workers(settings: Settings):
    return 12 if settings.device == "cuda" and not settings.tiny else 1


def count_ready_batches(settings: Settings):
    """Return how many batches workers make ahead of the step."""
    return AHEAD * count_workers(settings)


def make_step(settings: Settings):
    """Return a function that makes one training step."""
    faults, device = settings.faults, settings.device
    batch, width, hidden = (16, 8, 32) if settings.tiny else (32_768, 128, 2048)
    rows = [int(10 * 1.6**at) for at in range(4 if settings.tiny else 24)]
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Recommender(rows, width, hidden, faults).to(device)
    compile_if_asked(model, faults)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=device == "cuda")
    loader = DataLoader(
        Clicks(rows, batch, faults),
        batch_size=None,
        num_workers=count_workers(settings),
        pin_memory=device == "cuda",
        prefetch_factor=AHEAD,
    )
    batches = iter(loader)
    right, areas, seen = torch.zeros((), device=device), 0.0, [Counter() for _ in rows[:12]]

    def check_places(places):
        for column, count in enumerate(rows):
            if places[:, column].max() >= count:  # fault: checks
                raise ValueError(f"column {column} has a category that its table has not")

    def step():
        nonlocal right, areas
        places, numbers, clicked = next(batches)
        if "counts" in faults:
            for column, counter in enumerate(seen):
                counter.update(places[:, column].tolist())  # fault: counts
        places = places.long() if "long" in faults else places
        places = places.to(device, non_blocking=True)  # fault: long
        numbers, clicked = (each.to(device, non_blocking=True) for each in (numbers, clicked))
        if "checks" in faults:
            check_places(places)
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(places, numbers).float()
        loss = (written_loss if "loss" in faults else F.binary_cross_entropy_with_logits)(logits, clicked)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        right += ((logits.detach() > 0) == (clicked > 0)).float().mean()
        if "area" in faults:
            areas += measure_area(logits, clicked)

    return step


if __name__ == "__main__":
    main(make_step)
