"""An ordinary training script: ``python -m profkit.models tiny``; ``profkit run model.tiny`` records it as any other.

Its ranges ``warmup`` and ``step N`` say where its steps begin and end; forward, loss, backward and optimizer each lie
in a range of that name. Started by torch's launcher, each rank trains the model with DistributedDataParallel. An error
that a person can do something about is one line on standard error.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import NoReturn

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from profkit.annotation import annotate
from profkit.errors import ProfkitError, RunError, UsageError
from profkit.models import TrainingOptions, backward_flops, forward_flops, parse_options
from profkit.models.transformer import TransformerLM
from profkit.names import BACKWARD, COUNTED, FORWARD, LOSS, OPTIMIZER, WARMUP, context_range, step_range

_LONGEST_S = 5.0


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


def train(options: TrainingOptions) -> None:
    """Train the model as the options say; UsageError if the machine lacks what they ask for."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = choose_device(options)
    with _group(device, ranks):
        trainings: list[Training] = []
        for context in options.contexts:
            shared = trainings[0] if trainings else None
            trainings.append(Training(options, context, device, rank=rank, ranks=ranks, shared=shared))
        for _ in range(options.warmup_steps):
            with annotate(WARMUP):
                for training in trainings:
                    training.step()
        start = perf_counter()
        _run_steps(trainings, options.steps)
        once_s = perf_counter() - start
        for done in range(1, options.rounds):
            if not _decided_by_first(once_s * (done + 1) < _LONGEST_S, device):
                break
            _run_steps(trainings, options.steps)
        if options.count:
            with annotate(COUNTED):
                for training in trainings:
                    with _context(training, trainings):
                        training.step(compiled=False)


def _run_steps(trainings: Sequence[Training], steps: int) -> None:
    for training in trainings:
        with _context(training, trainings):
            for number in range(steps):
                with annotate(step_range(number)):
                    training.step()


def _context(training: Training, trainings: Sequence[Training]) -> annotate | nullcontext[None]:  # type: ignore[valid-type]
    return annotate(context_range(training.context)) if len(trainings) > 1 else nullcontext()


def choose_device(options: TrainingOptions) -> torch.device:
    """Return the device to train on, CUDA for ``auto`` where this torch sees a GPU; UsageError if it cannot be used."""
    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        raise UsageError(f"--device cuda: this torch ({torch.__version__}) sees no CUDA GPU; leave --device out")
    device = "cuda" if has_gpu and options.device != "cpu" else "cpu"
    if device == "cpu" and options.dtype == "tf32":
        raise UsageError("--dtype tf32: only CUDA GPUs have TF32, and the model would run on the CPU; leave it out")
    return torch.device(device)


@contextmanager
def _group(device: torch.device, ranks: int) -> Iterator[None]:
    if ranks == 1:
        yield
        return
    if device.type == "cuda":
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if torch.cuda.device_count() < local:
            raise UsageError(f"--nproc-per-node {local}: this machine has {torch.cuda.device_count()} GPUs to train on")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        distributed.destroy_process_group()


def _decided_by_first(decision: bool, device: torch.device) -> bool:
    """Return the first rank's decision on all of them: clocks differ, and a step takes every rank."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return decision
    shared = torch.tensor([int(decision)], device=device)
    distributed.broadcast(shared, src=0)
    return bool(shared.item())


def explain(error: Exception, options: TrainingOptions) -> ProfkitError | None:
    """Return in one line what a person can do about an error; None for one that is nobody's but profkit's."""
    smaller = "try a smaller --batch, --context or model"
    if isinstance(error, ProfkitError):
        return error
    if isinstance(error, torch.cuda.OutOfMemoryError):
        wanted = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
        return RunError(f"the GPU's memory is full{f' ({wanted[1]} more did not fit)' if wanted else ''}; {smaller}")
    if isinstance(error, torch._dynamo.exc.TorchDynamoException):
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return RunError(f"--compile {options.compile_mode}: {line}; leave --compile out")
    if "can't allocate memory" in str(error):  # how torch reports a CPU tensor that does not fit
        return RunError(f"the memory is full; {smaller}")
    return None


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(sys.argv[1:] if argv is None else argv)
    try:
        train(options)
    except Exception as error:
        known = explain(error, options)
        if known is None:
            raise
        end_with(known)


def end_with(error: ProfkitError) -> NoReturn:
    rank = os.environ.get("RANK")
    sys.stderr.write(f"profkit: {'' if rank is None else f'rank {rank}: '}{error}\n")
    # As Python itself keeps an exception that nobody catches: what records this process reads it.
    sys.last_value = error
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
