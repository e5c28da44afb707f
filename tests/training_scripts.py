"""Scripts that train a small model: what a test needs of its own is put in."""

from __future__ import annotations

from textwrap import indent

_SCRIPT = """{before}
import torch
from torch import nn

{joins}torch.manual_seed({seed})
model = {model}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range({steps}):
    loss = model({batch}).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
{at_step}
{after}
{leaves}"""

_JOINS = """from torch import distributed
distributed.init_process_group("gloo")
"""
_LEAVES = """del model  # or torch may wait, with the GIL, for gloo's thread, which waits for the GIL
distributed.destroy_process_group()
"""


def training(
    steps: int | str,
    at_step: str = "",
    *,
    before: str = "",
    after: str = "",
    model: str = "nn.Linear(4, 4)",
    batch: str = "torch.ones(2, 4)",
) -> str:
    """Return a script with this number of steps, and code at each step's end, before torch's import and after all.

    It knows ``model``, ``optimizer``, and in a step ``number`` and ``loss``.
    """
    parts = {"steps": steps, "at_step": indent(at_step, " " * 4), "before": before, "after": after}
    return _SCRIPT.format(**parts, model=model, batch=batch, joins="", leaves="", seed=0)


def training_of_ranks(
    steps: int,
    at_step: str = "",
    *,
    before: str = "",
    model: str = "nn.Linear(4, 4)",
    batch: str = "torch.ones(2, 4)",
) -> str:
    """Return a script as `training` does, of ranks that average their gradients; it knows ``distributed`` too."""
    parts = {"steps": steps, "at_step": indent(at_step, " " * 4), "before": before, "after": "", "batch": batch}
    model = f"nn.parallel.DistributedDataParallel({model})"
    return _SCRIPT.format(**parts, model=model, joins=_JOINS, leaves=_LEAVES, seed="distributed.get_rank()")
