"""How deep ranges reach by default: two levels below what a model repeats, whatever its names look like."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from torch import nn

from profkit.capture.hooks.module_names import reach_by_tree


class Calls(nn.Module):
    """A module with parts that somebody calls."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self) -> None:
        """Never called here."""


class Block(Calls):
    """A transformer's layer: its attention is four levels deep."""

    def __init__(self) -> None:
        inner = Calls(heads=Calls(rotary=nn.Identity()))
        super().__init__(
            ln_1=nn.LayerNorm(4), attn=Calls(c_attn=nn.Linear(4, 4), inner=inner), mlp=Calls(fc=nn.Linear(4, 4))
        )


def test_containers_that_are_never_called_are_no_level() -> None:
    parts = {"wte": nn.Embedding(4, 4), "h": nn.ModuleList(Block() for _ in range(3))}
    reach = reach_by_tree(Calls(transformer=nn.ModuleDict(parts), lm_head=nn.Linear(4, 4)))
    assert {
        "transformer.h.2",
        "transformer.h.2.attn",
        "transformer.h.2.attn.inner",
        "transformer.h.2.mlp.fc",
    } <= reach.paths
    assert "transformer.h.2.attn.inner.heads" not in reach.paths
    assert {"transformer.wte", "lm_head"} <= reach.paths
    assert reach.left_out is None


def test_a_deeper_block_reaches_deeper() -> None:
    model = Calls(model=Calls(decoder=Calls(layers=nn.ModuleList(Block() for _ in range(2)))))
    reach = reach_by_tree(model)
    assert "model.decoder.layers.1.attn.inner" in reach.paths
    assert "model.decoder.layers.1.attn.inner.heads" not in reach.paths


def test_numbered_stages_are_blocks_as_well() -> None:
    stages = {f"layer{number}": nn.Sequential(Block(), Block()) for number in range(1, 5)}
    reach = reach_by_tree(Calls(conv1=nn.Conv2d(3, 4, 1), **stages))
    assert "layer4.1.attn" in reach.paths
    assert "layer4.1.attn.c_attn" not in reach.paths


def test_a_small_model_shows_three_levels() -> None:
    model = Calls(a=Calls(b=Calls(c=Calls(d=nn.Identity()))))
    assert reach_by_tree(model).paths == {"a", "a.b", "a.b.c"}


def test_a_level_with_too_many_modules_is_left_out_as_a_whole() -> None:
    def layer() -> nn.Module:
        experts = nn.ModuleList(Calls(up=nn.Linear(1, 1)) for _ in range(100))
        return Calls(attn=Calls(q=nn.Linear(1, 1)), mlp=Calls(gate=nn.Linear(1, 1), experts=experts))

    reach = reach_by_tree(Calls(layers=nn.ModuleList(layer() for _ in range(12))))
    assert {"layers.11.attn", "layers.11.mlp"} <= reach.paths
    assert not {"layers.11.attn.q", "layers.0.mlp.experts.0"} & reach.paths
    assert reach.left_out is not None
    assert (reach.left_out.modules, reach.left_out.depth) == (12 * 102, 5)
