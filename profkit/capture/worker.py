"""The worker process of a run whose steps profkit drives: ``python -m profkit.capture.worker ORDER``.

``ORDER`` is an `Order` in JSON. The worker makes the `Steps` of a built-in model or of a user's callable, warms up,
runs the measured steps under the recorder, and writes what `measure` returns to the order's ``result_path``. It prints
nothing unless it fails: then one line where the cause is known, the traceback where it is the user's own code, and exit
status 1 or the error's own.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from profkit.capture.callable_steps import CallableSteps, TargetRaisedError
from profkit.capture.clean_twin import Measured, measure_clean, measure_steps
from profkit.capture.conditions import read_conditions
from profkit.capture.contexts import ContextSteps
from profkit.capture.kineto import recorded_by_kineto
from profkit.capture.local_ranks import describe_rank, recorded_together_by_nsys
from profkit.capture.nsys import recorded_by_nsys
from profkit.capture.outputs import take_outputs
from profkit.capture.rank_group import joined, order_of_this_rank
from profkit.capture.recorded_training import recorded_training
from profkit.capture.script_memory import ScriptMemory
from profkit.capture.step import TrainingStep, choose_device
from profkit.capture.whole_files import write_json
from profkit.errors import ProfkitError, RunError, UsageError
from profkit.models.workload import CallableWorkload, MemoryOrder, Order, Workload

# What a kernel's failure, a lost GPU or a driver that is too old look like; the advice that torch adds is left out.
_GPU_FAILURE = re.compile(r"CUDA (?:driver )?error: [^\n]+|GPU is lost|unspecified launch failure")

_PACKAGE = Path(__file__).parent.parent


class Steps(Protocol):
    """A workload that is ready to run: what the worker asks of every kind of target."""

    @property
    def losses(self) -> list[float]:
        """Each measured step's loss, where it has one."""

    @property
    def parameter_count(self) -> int | None:
        """How many numbers are trained, where that is known."""

    @property
    def autocast_dtypes(self) -> Collection[str]:
        """The types that autocast was seen to compute in."""

    def run_warmup(self) -> None:
        """Run the warm-up steps inside a ``warmup`` range."""

    def run_measured(self) -> list[dict[str, int]]:
        """Run the measured steps, each in a range of its own, and return each one's times in ns."""


def measure(order: Order) -> dict[str, Any]:
    """Run the order and return what the manifest keeps of it: the steps' times in ns, losses, versions, the device."""
    device = choose_device(order.workload)
    with joined(order, device):
        steps, done = _run_recorded(order, device) if order.memory is None else _record_memory(order, device)
    on_gpu = device.type == "cuda" and torch.cuda.is_initialized()
    return {
        "device": "cuda" if on_gpu else "cpu",
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "parameter_count": steps.parameter_count,
        "conditions": read_conditions(steps.autocast_dtypes),
        "losses": done.losses,
        "steps": done.times,
        "during": done.during,
        **({"unbroken": done.unbroken} if done.unbroken else {}),
        "work": steps.work if isinstance(steps, CallableSteps) else None,
        **(describe_rank() if order.workload.ranks > 1 else {}),
    }


def make_steps(order: Order, device: torch.device) -> Steps:
    """Return the order's workload, ready to run on ``device``."""
    if isinstance(order.workload, CallableWorkload):
        return CallableSteps(order.workload, hooked=order.recorder != "none")
    if order.workload.contexts:
        return ContextSteps(order.workload, device)
    return TrainingStep(order.workload, device)


def _run_recorded(order: Order, device: torch.device) -> tuple[Steps, Measured]:
    steps = make_steps(order, device)
    steps.run_warmup()
    # A user's step is called as often as was asked: its data may come to an end.
    if order.recorder == "none" and isinstance(steps, TrainingStep | ContextSteps):
        return steps, measure_clean(steps, device)
    with _recorded(order, device):
        return steps, measure_steps(steps)


def _record_memory(order: Order, device: torch.device) -> tuple[Steps, Measured]:
    """Run all of it, the building of the model included, while the allocator's history is recorded."""
    workload, memory = order.workload, order.memory
    assert memory is not None
    if isinstance(workload, CallableWorkload):
        return _remember_callable(workload, memory)
    if device.type != "cuda":
        raise UsageError("--memory records the CUDA allocator, and this machine has no CUDA GPU; leave --memory out")
    with recorded_training(workload, device, memory) as step:
        step.run_warmup()
        return step, measure_steps(step)


def _remember_callable(workload: CallableWorkload, memory: MemoryOrder) -> tuple[Steps, Measured]:
    """Run a callable's steps; record the allocator from their first use of CUDA on, to their end or their failure."""
    recording = ScriptMemory(Path(memory.snapshot_path).parent, memory.options)
    recording.wait_for_cuda()
    try:
        steps = CallableSteps(workload, hooked=True, memory=recording)
        steps.run_warmup()
        done = measure_steps(steps)
    finally:
        recording.finish()
    found = recording.result()
    if found is None:
        raise UsageError(f"--memory records the CUDA allocator, and {workload.target} used no CUDA GPU; leave it out")
    if found["failure"] is not None:
        raise RunError(f"nothing was recorded of the memory: {found['failure']}")
    return steps, done


def _recorded(order: Order, device: torch.device) -> AbstractContextManager[None]:
    if order.trace_path is not None:
        return recorded_by_kineto(Path(order.trace_path), device)
    if order.recorder == "nsys" and order.workload.ranks > 1:
        return recorded_together_by_nsys(Path(order.result_path).parent, device)
    if order.recorder == "nsys":
        return recorded_by_nsys(device)
    return nullcontext()


def main() -> None:
    """Carry out the order on the command line."""
    order = take_outputs(order_of_this_rank(Order.from_json(sys.argv[1])))
    try:
        write_json(Path(order.result_path), measure(order))
    except ProfkitError as error:
        _fail(order, str(error), error.exit_code)
    except TargetRaisedError as error:
        _fail_in_their_code(order, error.original)
    except torch.cuda.OutOfMemoryError as error:
        wanted = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
        more = f" ({wanted[1]} more did not fit)" if wanted else ""
        _fail(order, f"the GPU's memory is full{more}; try a smaller --batch, --context or model")
    except torch._dynamo.exc.TorchDynamoException as error:
        mode = order.workload.compile_mode if isinstance(order.workload, Workload) else ""
        _fail(order, f"--compile {mode}: {_first_line(error)}; leave --compile out")
    except RuntimeError as error:
        lost = _GPU_FAILURE.search(str(error))
        if lost:
            _fail_on_gpu(order, lost[0])
        if "can't allocate memory" not in str(error):  # how torch reports a CPU tensor that does not fit
            raise
        _fail(order, "the memory is full; try a smaller --batch, --context or model")
    except OSError as error:
        _fail(order, f"{error.filename or Path(order.result_path).parent}: {error.strerror or error}")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _fail_in_their_code(order: Order, error: Exception) -> NoReturn:
    """Show the traceback from where the user's code begins, leave its last line for the manifest, and exit."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace)
    sys.stderr.write("".join(lines))
    write_json(Path(order.result_path), {"error": lines[-1].strip()})
    sys.exit(1)


def _fail_on_gpu(order: Order, failure: str) -> NoReturn:
    """Say what the GPU's failure was and end at once: torch's own clean-up would ask the lost GPU again, and abort."""
    try:
        _fail(
            order, f"the GPU failed: {failure}; nvidia-smi says whether it is still there, dmesg which Xid it reported"
        )
    finally:
        sys.stderr.flush()
        os._exit(1)


def _is_ours(file: str) -> bool:
    """Return whether a frame belongs to profkit or to the import system, not to the user."""
    return file.startswith("<frozen importlib") or Path(file).is_relative_to(_PACKAGE) or file == importlib.__file__


def _fail(order: Order, message: str, status: int = 1) -> NoReturn:
    """Say why on standard error, leave it for the manifest too, and exit."""
    whose = f"rank {os.environ['RANK']}: " if order.workload.ranks > 1 else ""
    sys.stderr.write(f"profkit: {whose}{message}\n")
    with suppress(OSError):  # a full disk may be the very reason
        write_json(Path(order.result_path), {"error": message})
    sys.exit(status)


if __name__ == "__main__":
    main()
