"""The training step: what is timed, in which ranges, on which data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter_ns

import torch
from torch import Tensor, distributed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from profkit.annotation import annotate
from profkit.errors import UsageError
from profkit.models.flops import backward_flops, forward_flops
from profkit.models.transformer import TransformerLM
from profkit.models.workload import CallableWorkload, Workload
from profkit.names import BACKWARD, FORWARD, LOSS, OPTIMIZER, WARMUP, step_range


def choose_device(workload: Workload | CallableWorkload) -> torch.device:
    """Return the device to run on; ``auto`` is CUDA where this torch sees a GPU."""
    if workload.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device cuda: this torch ({torch.__version__}) sees no CUDA GPU; leave --device out")
    device = workload.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and isinstance(workload, Workload) and workload.dtype == "tf32":
        raise UsageError("--dtype tf32: only CUDA GPUs have TF32, and the model would run on the CPU; leave it out")
    return torch.device(device)


class StepObserver:
    """Is told of steps and phases as they pass; this one does nothing."""

    @contextmanager
    def step(self, name: str, number: int | None) -> Iterator[None]:
        """Enclose a step; ``number`` is None in warm-up."""
        del name, number
        yield

    def forward(self) -> AbstractContextManager[object]:
        """Return what encloses the forward pass of a training step."""
        return nullcontext()

    def loss_made(self, loss: Tensor) -> None:
        """Be told of the loss before its backward pass."""

    def phase_begun(self, name: str) -> None:
        """Be told that a phase begins; the device has done what came before it."""

    def phase_done(self, name: str) -> None:
        """Be told that a phase's work has been enqueued."""


class TrainingStep:
    """A built-in model with its optimizer and one batch of random tokens, ready to run step by step.

    Every step sees the same batch, so that it does the same work and copies no input. The device is waited for at the
    end of each phase, inside its range: a phase's time is then all of its work, profiled or not. Unbroken steps wait
    once, at their end: while the device works through a phase the host may be launching the next.

    Args:
        shared: the same model made for another context, whose parameters and optimizer this one takes.
    """

    def __init__(self, workload: Workload, device: torch.device, shared: TrainingStep | None = None) -> None:
        torch.manual_seed(workload.seed)
        if workload.dtype == "tf32":
            torch.set_float32_matmul_precision("high")
        self.workload = workload
        self.device = device
        preset = workload.preset
        with device:
            self.module = TransformerLM(preset, workload.context, workload.checkpoint_layers)
            if workload.ranks > 1:  # the same parameters, and a batch of its own
                torch.manual_seed(workload.seed + distributed.get_rank())
            tokens = torch.randint(preset.vocab_size, (workload.batch, workload.context + 1))
        self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:]
        self.optimizer: torch.optim.Optimizer | None
        if shared is None:
            self.optimizer = torch.optim.AdamW(self.module.parameters()) if workload.passes == "train" else None
        else:
            _share_parameters(self.module, shared.module)
            self.optimizer = shared.optimizer
        self.model = _compiled(self._replicated(), workload)
        size = (preset, workload.batch, workload.context)
        self.flops = {FORWARD: forward_flops(*size), BACKWARD: backward_flops(*size)}
        self.loss: Tensor | None = None
        self.losses: list[float] = []
        self._observer = StepObserver()
        self._waits_for_phases = True

    def _replicated(self) -> torch.nn.Module:
        """Return the module, or with several ranks what also averages their gradients."""
        return self.module if self.workload.ranks == 1 else DistributedDataParallel(self.module)

    @property
    def parameter_count(self) -> int:
        """How many numbers are trained."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def autocast_dtypes(self) -> tuple[str, ...]:
        """The type that autocast computes in, if it is on."""
        return ("bfloat16",) if self.workload.dtype == "bf16" else ()

    def observe(self, observer: StepObserver) -> None:
        """Tell ``observer`` of each phase and step from now on."""
        self._observer = observer

    def run_warmup(self) -> None:
        """Run the warm-up steps inside one ``warmup`` range, without step ranges of their own."""
        with annotate(WARMUP):
            for number in range(self.workload.warmup_steps):
                with self._observer.step(f"{WARMUP} {number}", None):
                    self._run_phases()

    def run_measured(self) -> list[dict[str, int]]:
        """Run the measured steps and return each one's times: ``<phase>_ns`` and ``step_ns``."""
        times = []
        for number in range(self.workload.steps):
            start_ns = perf_counter_ns()
            with self._observer.step(step_range(number), number), annotate(step_range(number)):
                phases = self._run_phases()
            times.append({**phases, "step_ns": perf_counter_ns() - start_ns})
            if self.loss is not None:
                self.losses.append(float(self.loss))
        return times

    def run_unbroken(self) -> list[dict[str, int]]:
        """Run as many steps as are measured, each waited for at its end alone, and return each one's ``step_ns``."""
        self._waits_for_phases = False
        times = []
        for _ in range(self.workload.steps):
            start_ns = perf_counter_ns()
            self._run_phases()
            self._wait()
            times.append({"step_ns": perf_counter_ns() - start_ns})
        self._waits_for_phases = True
        return times

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _run_phases(self) -> dict[str, int]:
        if self.workload.compile_mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        times: dict[str, int] = {}
        if self.workload.passes == "forward":
            with torch.no_grad(), self._phase(FORWARD, times), self._autocast():
                self.model(self.inputs)
            return times
        with self._phase(FORWARD, times), self._autocast(), self._observer.forward():
            logits = self.model(self.inputs)
        with self._phase(LOSS, times), self._autocast():
            loss = cross_entropy(logits.flatten(0, 1), self.targets.flatten())
        self._observer.loss_made(loss)
        with self._phase(BACKWARD, times):
            loss.backward()
        if self.optimizer is None:
            self.module.zero_grad(set_to_none=True)
        else:
            with self._phase(OPTIMIZER, times):
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()
        return times

    @contextmanager
    def _phase(self, name: str, times: dict[str, int]) -> Iterator[None]:
        start_ns = perf_counter_ns()
        with annotate(name, flops=self.flops.get(name)):
            self._observer.phase_begun(name)
            yield
            self._observer.phase_done(name)
            if self._waits_for_phases:
                self._wait()
        times[f"{name}_ns"] = perf_counter_ns() - start_ns

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.workload.dtype == "bf16")


def _compiled(module: torch.nn.Module, workload: Workload) -> torch.nn.Module:
    if workload.compile_mode == "none":
        return module
    # With several contexts torch would take the second one for a sign of shapes that change, and compile for any.
    return torch.compile(module, mode=workload.compile_mode, dynamic=False)


def _share_parameters(module: torch.nn.Module, source: torch.nn.Module) -> None:
    """Let ``module`` have the parameters of ``source``, and keep its own buffers: they are as long as its context."""
    for mine, theirs in zip(module.modules(), source.modules(), strict=True):
        mine._parameters = theirs._parameters
