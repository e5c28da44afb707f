"""The text that the allocator writes into its events: profkit's own, or the script's."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from profkit.capture import memory_history as recording


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the allocator of paper was told; the last is what it writes."""
    told = [""]
    monkeypatch.setattr(torch.cuda.memory, "_get_memory_metadata", lambda: told[-1])
    monkeypatch.setattr(torch.cuda.memory, "_set_memory_metadata", told.append)
    return told


@pytest.mark.parametrize(
    ("phase", "module", "text"),
    [
        ("backward", "blocks.0", "profkit:backward:blocks.0"),
        ("loss", None, "profkit:loss:"),
        (None, "model", "profkit:forward:model"),
        (None, None, ""),
    ],
)
def test_the_text_names_phase_and_module(texts: list[str], phase: str | None, module: str | None, text: str) -> None:
    recording.write_text("forward", "before")
    recording.write_text(phase, module)
    assert texts[-1] == text


def test_a_text_of_the_scripts_own_stays(texts: list[str]) -> None:
    texts.append("epoch 3")
    recording.write_text("forward", "model")
    recording.write_text(None, None)
    assert texts[-1] == "epoch 3"
