"""What is counted by hand of each program in ``tests/programs``: its phases and modules in one step.

Counts are per recorded step. Paths begin below the step. Ranges that torch itself opens for torch.profiler are
no part of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent / "programs"


@dataclass(frozen=True)
class Program:
    """One program: how it is started, and what one step of it holds.

    ``steps`` is how many of the two that are asked for there are: a program without any is one. ``phases`` are all
    ranges that lie directly in a step; ``paths`` are some of those below them, each the only one of
    its name there. ``linked`` is False where torch.profiler's links cannot say which module a backward operator
    belongs to. ``step`` is what the run's end says that a step is, or "" where others show it.
    """

    script: str
    phases: Mapping[str, int]
    paths: Mapping[str, int] = field(default_factory=dict)
    argument: str = ""
    steps: int = 2
    ranks: int = 1
    linked: bool = True
    step: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """The command after ``python``."""
        launcher = ("-m", "torch.distributed.run", "--nproc-per-node", str(self.ranks)) if self.ranks > 1 else ()
        return (*launcher, str(FOLDER / f"{self.script}.py"), *filter(None, [self.argument]))


def _both_ways(*modules: str, times: int = 1) -> dict[str, int]:
    return {f"{phase}/{module}": times for phase in ("forward", "backward") for module in modules}


_STEP = {"forward": 1, "backward": 1, "optimizer": 1}
_BLOCK_PARTS = [f"blocks.{number}/blocks.{number}.{part}" for number in range(3) for part in ("norm", "mlp")]
_INNER = [f"blocks.{number}.mlp" for number in range(3)]
_CHECKPOINTED = _both_ways("model/embed", "model/head") | {f"forward/model/{path}": 1 for path in _BLOCK_PARTS}

PROGRAMS: dict[str, Program] = {
    "plain loop": Program(
        "plain_loop",
        _STEP | {"loss": 1},
        _both_ways("model", *(f"model/features/features.{number}" for number in range(4)), "model/norm", "model/head")
        | {"loss/CrossEntropyLoss": 1, "backward/CrossEntropyLoss": 1},
    ),
    "gradient accumulation": Program(
        "accumulation",
        {"forward": 3, "backward": 3, "optimizer": 1},
        _both_ways("model/0", "model/1", "model/2", "model/3", times=3),
    ),
    "attention without module and optimizer": Program("attention_benchmark", {"backward": 1}, step="one backward pass"),
    "products of matrices alone": Program("matrix_products", {}, steps=1),
    "GAN": Program(
        "gan",
        {"forward": 4, "loss": 3, "backward": 3, "optimizer": 2},
        _both_ways(*(f"Discriminator/Discriminator.main/Discriminator.main.{number}" for number in range(3)), times=3)
        | _both_ways(*(f"Generator/Generator.main/Generator.main.{number}" for number in range(3)))
        | {"optimizer/Adam": 1, "optimizer/SGD": 1},
        step="one step each of the optimizers Adam and SGD",
    ),
    "Muon and AdamW": Program(
        "muon",
        _STEP | {"optimizer": 2},
        _both_ways("model/embed", "model/up", "model/down") | {"optimizer/AdamW": 1, "optimizer/Muon": 1},
    ),
    "gradient penalty": Program(
        "gradient_penalty",
        {"forward": 3, "backward": 2, "optimizer": 1},
        {f"forward/model/{number}": 3 for number in range(3)},
        # A weight that the first pass transposed has a share in the second derivative: only links know its module.
        linked=False,
    ),
    "Wasserstein GAN": Program(
        "wasserstein",
        {"forward": 4, "backward": 2, "optimizer": 2},
        _both_ways(*(f"critic/critic.{number}" for number in range(3)), times=3)
        | _both_ways(*(f"generator/generator.{number}" for number in range(3)))
        | {"optimizer/optimizer_c": 1, "optimizer/optimizer_g": 1},
        step="one step each of the optimizers optimizer_c and optimizer_g",
    ),
    **{
        f"checkpointed, {how}": Program(
            "checkpointed",
            _STEP,
            _CHECKPOINTED | {f"backward/recompute/{path}": 1 for path in again},
            argument=how,
        )
        for how, again in {
            "reentrant": _BLOCK_PARTS,
            "non-reentrant": _BLOCK_PARTS,
            "nested": [*(part for part in _BLOCK_PARTS if part.endswith("norm")), *_INNER],
        }.items()
    },
    "torch.func": Program(
        "functional", {"forward": 1, "backward": 1}, _both_ways(*(f"model/{number}" for number in range(3)))
    ),
    "TorchScript": Program(
        "torchscript",
        # What was traced is called once, and once more without gradients by torch's check of it; tracing has no range.
        _STEP | {"forward": 2, "inference": 1},
        {f"{phase}/RecursiveScriptModule": 1 for phase in ("forward", "backward")}
        | {"forward/TopLevelTracedModule": 1, "inference/Net/Net.features": 1, "inference/Net/Net.head": 1},
        linked=False,  # torch.profiler links no operator of a scripted graph
    ),
    "compiled": Program("compiled", _STEP, _both_ways("model"), linked=False),
    "data loader with workers": Program(
        "data_workers", _STEP | {"data": 1}, _both_ways("model/0", "model/1", "model/2")
    ),
    "autocast and gradient scaler": Program("mixed_precision", _STEP, _both_ways("model/0", "model/1", "model/2")),
    "LBFGS with a closure": Program(
        "lbfgs",
        {"forward": 3, "backward": 3, "optimizer": 3},
        _both_ways(*(f"model/{number}" for number in range(3)), times=3),
    ),
    "average of the weights and validation": Program(
        "ema_validation",
        _STEP | {"loss": 1, "inference": 2},
        _both_ways(*(f"model/{number}" for number in range(4)))
        | {f"inference/average/average.{number}": 1 for number in range(4)}
        | {"loss/MSELoss": 1, "inference/MSELoss": 1, "backward/MSELoss": 1},
    ),
    "inference": Program("inference", {"inference": 1}, {f"inference/model/{number}": 1 for number in range(5)}),
    "generation": Program(
        "generate",
        {"prefill": 1, "decode": 3},
        {
            f"{phase}/model/{module}": times
            for phase, times in (("prefill", 1), ("decode", 3))
            for module in ("embed", "qkv", "lm_head")
        },
        step="one call of",
    ),
    "DDP": Program(
        "ddp",
        {"forward": 2, "backward": 2, "optimizer": 1},
        _both_ways("model/0", "model/1", "model/2", times=2),
        ranks=2,
        linked=False,
    ),
}

ON_A_GPU: dict[str, Program] = {
    "whole step in a CUDA graph": Program(
        "whole_graph",
        _STEP,
        _both_ways("model/0", "model/1", "model/2"),
        linked=False,
        step="one replay of a CUDA graph",
    )
}
"""Programs that need a GPU."""

ON_TWO_GPUS: dict[str, Program] = {
    "model on two GPUs": Program(
        "two_gpus",
        _STEP,
        _both_ways(*(f"model/{half}/{half}.{number}" for half in ("first", "second") for number in range(3))),
    ),
    "DataParallel": Program(
        "data_parallel",
        _STEP,
        {"forward/model": 1},
        linked=False,  # several threads run the forward pass, and their sequence numbers are the same
    ),
}
"""Programs that need two."""
