"""Q-learning that draws its batches from a buffer in NumPy and keeps a slow copy of its network."""

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from machine import DEVICE, run, size

STATE, ACTIONS, WIDTH, BATCH, BUFFER = 64, 12, size(1024, 16), size(4096, 8), size(200_000, 100)


def make_network():
    return nn.Sequential(
        nn.Linear(STATE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
        nn.Linear(WIDTH, ACTIONS),
    )  # fmt: skip


def draw(buffer, random):
    at = random.integers(BUFFER, size=BATCH)
    return [part[at] for part in buffer]


def main(edit, steps, on_step):
    random = np.random.default_rng(0)
    buffer = (
        random.standard_normal((BUFFER, STATE), dtype=np.float32),
        random.integers(ACTIONS, size=BUFFER),
        random.standard_normal(BUFFER, dtype=np.float32),
        random.standard_normal((BUFFER, STATE), dtype=np.float32),
    )
    network = make_network().to(DEVICE)
    slow = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)
    ready = draw(buffer, random) if "no-host" in edit else None
    losses = []
    for _ in range(steps):
        parts = ready if ready is not None else draw(buffer, random)  # mark: host
        states, actions, rewards, following = (torch.from_numpy(part).to(DEVICE) for part in parts)
        with torch.no_grad():
            goal = rewards + 0.99 * slow(following).amax(1)
        loss = F.smooth_l1_loss(network(states).gather(1, actions[:, None])[:, 0], goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach() if "no-wait" in edit else loss.item())  # mark: wait
        with torch.no_grad():
            for mine, other in zip(slow.parameters(), network.parameters()):
                mine.lerp_(other, 0.005)
        on_step()


if __name__ == "__main__":
    run(main)
