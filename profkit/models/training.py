"""The training step of a built-in model: forward, loss, backward, optimizer, each in a range of its name."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from profkit.annotation import annotate
from profkit.models.flops import backward_flops, forward_flops
from profkit.models.options import TrainingOptions
from profkit.models.transformer import TransformerLM
from profkit.names import BACKWARD, FORWARD, LOSS, OPTIMIZER


class Training:
    """A model with its optimizer and one batch of random tokens.

    Every step sees the same batch, so that it does the same work and copies no input.

    Args:
        rank: this process among ``ranks``; each trains the same parameters on a batch of its own.
        shared: the same model made for another context; this one takes its parameters and its optimizer.
    """

    def __init__(
        self,
        options: TrainingOptions,
        context: int,
        device: torch.device,
        *,
        rank: int = 0,
        ranks: int = 1,
        shared: Training | None = None,
    ) -> None:
        torch.manual_seed(options.seed)
        if options.dtype == "tf32":
            torch.set_float32_matmul_precision("high")
        self.options = options
        self.context = context
        self.device = device
        with device:
            self.module = TransformerLM(options.preset, context, options.checkpoint_layers)
            if ranks > 1:
                torch.manual_seed(options.seed + rank)
            tokens = torch.randint(options.preset.vocab_size, (options.batch, context + 1))
        self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:]
        self.optimizer: torch.optim.Optimizer | None = None
        if shared is not None:
            share_parameters(self.module, shared.module)
            self.optimizer = shared.optimizer
        elif options.passes == "train":
            self.optimizer = torch.optim.AdamW(self.module.parameters())
        self.replicated: nn.Module = DistributedDataParallel(self.module) if ranks > 1 else self.module
        self.model = self.replicated
        if options.compile_mode != "none":
            # With several contexts torch would otherwise compile the second one for any length.
            self.model = torch.compile(self.replicated, mode=options.compile_mode, dynamic=False)
        sizes = (options.preset, options.batch, context)
        self.forward_flops, self.backward_flops = forward_flops(*sizes), backward_flops(*sizes)

    def step(self, *, compiled: bool = True) -> float | None:
        """Make one step and return its loss, None without a loss; reading the loss waits for the device."""
        model = self.model if compiled else self.replicated
        if compiled and self.options.compile_mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        if self.options.passes == "forward":
            with torch.no_grad(), annotate(FORWARD, flops=self.forward_flops), self._autocast():
                model(self.inputs)
            return None
        with annotate(FORWARD, flops=self.forward_flops), self._autocast():
            logits = model(self.inputs)
        with annotate(LOSS), self._autocast():
            loss: Tensor = cross_entropy(logits.flatten(0, 1), self.targets.flatten())
        with annotate(BACKWARD, flops=self.backward_flops):
            loss.backward()
        if self.optimizer is None:
            self.module.zero_grad(set_to_none=True)
        else:
            with annotate(OPTIMIZER):
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.dtype == "bf16")


def share_parameters(module: nn.Module, source: nn.Module) -> None:
    """Let ``module`` have the parameters of ``source``, and keep its own buffers: they are as long as its context."""
    for mine, theirs in zip(module.modules(), source.modules(), strict=True):
        mine._parameters = theirs._parameters
