"""What the masks of a step hide: padding of its samples, and keys of its attention. Nothing waits until it is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from profkit.run.work import GivenMask, Padding

_HIDDEN = -1e4
"""What is added to the scores of hidden keys is this or less: the least number of a type, or an older model's."""
_LARGEST = 1 << 26
"""Looking at more numbers takes memory that a program may lack; such a mask counts as one that hides more."""


class Masks:
    """Takes masks while a step is counted; `padding` and `given` say what they hid."""

    def __init__(self) -> None:
        self._padding: list[tuple[int, torch.Tensor]] = []
        self._given: defaultdict[str, list[torch.Tensor]] = defaultdict(list)

    def add_samples(self, mask: torch.Tensor) -> None:
        """Take a model's mask of (samples, positions): those up to the longest sample's end, and the used ones."""
        used = mask.detach() != 0
        self._padding.append((mask.numel(), torch.stack([used.any(0).sum() * len(mask), used.sum()])))

    def add_lengths(self, positions: int, lengths: Any) -> None:
        """Take the same of a batch of samples of so many positions, whose lengths are known."""
        own = torch.as_tensor(lengths).detach()
        self._padding.append((positions * len(own), torch.stack([own.max() * len(own), own.sum()])))

    def add_attention(self, module: str, mask: torch.Tensor) -> None:
        """Take the mask of (…, queries, keys) that a module's fused attention is given, as numbers or what is seen."""
        mask = mask.detach()
        for axis, stride in enumerate(mask.stride()):
            mask = mask.narrow(axis, 0, 1) if stride == 0 and axis < mask.dim() - 2 else mask
        if mask.numel() > _LARGEST:
            self._given[module].append(torch.zeros(2, dtype=torch.bool, device=mask.device))
            return
        is_seen = mask if mask.dtype is torch.bool else mask == 0
        is_hidden = ~mask if mask.dtype is torch.bool else mask <= _HIDDEN
        causal = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
        is_causal = (is_seen == causal).all() & (is_hidden != causal).all()
        self._given[module].append(torch.stack([is_causal, is_seen.all()]))

    def padding(self) -> Padding | None:
        counts = [(positions, *used.tolist()) for positions, used in self._padding]
        return Padding(*map(sum, zip(*counts, strict=True))) if counts else None

    def given(self) -> Iterator[GivenMask]:
        for module, masks in self._given.items():
            causal, empty = torch.stack(masks).sum(0).tolist()
            yield GivenMask(module, len(masks), causal, empty)
