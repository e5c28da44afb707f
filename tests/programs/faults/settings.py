"""What programs with planted faults share: their command line, and their loop of steps."""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn


@dataclass(frozen=True)
class Settings:
    """The faults of a program and its sizes; ``tiny`` ones are for machines without a GPU."""

    faults: frozenset[str] = frozenset()
    tiny: bool = False
    steps: int = 200

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"


def read_settings() -> tuple[Settings, Path | None]:
    """Return what the command line asks for, and where times go if the program is to measure its own steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", action="append", default=[])
    parser.add_argument("--tiny", action="store_true", default=bool(os.environ.get("FAULTS_TINY")))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--times", type=Path)
    words = parser.parse_args()
    if "launch-blocking" in words.fault:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # CUDA reads it once, so that variants in one process cannot have it
    return Settings(frozenset(words.fault), words.tiny, words.steps), words.times


def compile_if_asked(model: nn.Module, faults: frozenset[str]) -> None:
    """Compile the model in place where a variant is measured with what a Try advises."""
    if "compiled" in faults:
        model.compile()
    if "graphed" in faults:
        model.compile(mode="reduce-overhead")


def main(make_step: Callable[[Settings], Callable[[], None]]) -> None:
    """Train as the command line says."""
    settings, _ = read_settings()
    step = make_step(settings)
    for _ in range(settings.steps):
        step()
