"""The allocator's recording in the target's process, from CUDA's first use to the process's end.

What the last recorded step leaves is written down where it ends. From then on only an allocation that fails writes
anything: the snapshot of that moment, over the one before.

Nothing here changes what the target does: CUDA is never initialised for it, no tensor is held, and whatever fails ends
the recording alone, and is reported by the launcher.

The allocator keeps a text for each thread and writes it into each event of its history (torch 2.10 and later): here
the phase and the module that the thread works for. The autograd thread has no Python stack, so more than half of the
bytes of a training step would otherwise carry nothing that says whose they are.
"""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from profkit.annotation import record_in_torch
from profkit.capture.hooks.backward_nodes import running_graph
from profkit.capture.hooks.module_calls import Watcher
from profkit.capture.hooks.module_names import Roots
from profkit.capture.owners import OwnerLedger, now_us, tensors_at_hand, watch_hooks
from profkit.capture.patches import call_between, patch, restore
from profkit.capture.steps.conditions import parameters_of
from profkit.files import PARTIAL, whole_file
from profkit.names import FORWARD, MEMORY_TEXT, step_range
from profkit.run.directory import OWNERS, SNAPSHOT, name_of_rank
from profkit.run.manifest import ProcessMemory
from profkit.run.owners import START
from profkit.run.recording import MemoryOptions

Arguments = ParamSpec("Arguments")

_NESTING = 4
_OUTSIDE = "(a parameter outside the modules)"
_PROTOCOL = 4
_OUT_OF_MEMORY = "out of memory"
_RESETS = ("torch._C._cuda_resetPeakMemoryStats", "torch._C._accelerator_resetPeakStats")
_RECORDS = ("torch._C._cuda_record_memory_history", "torch._C._cuda_record_memory_history_legacy")


def _harmless(
    method: Callable[Concatenate[MemoryRecording, OwnerLedger, Arguments], None],
) -> Callable[Concatenate[MemoryRecording, Arguments], None]:
    """Hand over the ledger, do nothing without one; a failure ends the recording and never reaches the script."""

    @functools.wraps(method)
    def guarded(self: MemoryRecording, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        if self.owners is None:
            return
        try:
            method(self, self.owners, *args, **kwargs)
        except Exception as error:
            self.give_up(error)

    return guarded


class MemoryRecording(Watcher):
    """Records the allocator of this process into ``run``: `wait_for_cuda` once, `close` at the end.

    Args:
        notes_steps: write down whose each storage is at every step, until `steps_end`; otherwise only where an
            allocation fails.
    """

    def __init__(self, run: Path, options: MemoryOptions, *, notes_steps: bool = True) -> None:
        self.follows_modules = notes_steps
        self._notes_steps = notes_steps
        self._run = run
        self._options = options
        self.owners: OwnerLedger | None = None
        """The ledger, while the allocator is recorded."""
        self._files: tuple[Path, Path] | None = None
        self._roots = Roots()
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._step: tuple[int, int] | None = None
        self._is_over = self._is_full = self._is_scripts_own = self._lacks_events = self._writes_text = False
        self._is_of_failure = False
        self._failed_allocations = 0
        self._peak_bytes = 0
        self._failure: str | None = None

    def wait_for_cuda(self) -> None:
        """Begin to record when this process first uses CUDA, before it can have allocated anything; maybe never."""
        watch_hooks()
        torch.cuda._lazy_call(self._begin)

    def steps_end(self) -> None:
        """Write the snapshot, unless a failed allocation of this step did; from now on only such allocations matter."""
        if self._notes_steps and not self._is_full:
            self._take("dump")
            self._is_of_failure = False
        self._notes_steps = False

    def close(self) -> None:
        """Stop recording, and delete unfinished files: a ledger without a snapshot is one."""
        self._stop()
        for path in self._files or ():
            _partial(path).unlink(missing_ok=True)

    def forget(self) -> None:
        """Do nothing more in this process: it is a forked copy, and the files belong to its parent."""
        self._is_over = True
        self.owners = None

    def give_up(self, error: Exception) -> None:
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        self._failure = next(iter(said.strip().splitlines()), "") or type(error).__name__
        self.close()

    def result(self) -> ProcessMemory | None:
        """Return what the launcher needs to know; None if this process never used CUDA."""
        if self._files is None and self._failure is None:
            return None
        is_there = self._files is not None and self._files[0].exists()
        return ProcessMemory(
            snapshot=self._files[0].name if self._files and is_there else None,
            allocated_peak_bytes=self._peak_bytes if self.owners is None else self.owners.allocated_peak_bytes,
            failure=self._failure,
            script_records=self._lacks_events,
            failed_allocations=self._failed_allocations,
            is_of_failure=self._is_of_failure,
        )

    @_harmless
    def boundary(self, owners: OwnerLedger, number: int) -> None:
        if not self._notes_steps:
            return
        if self._step is not None:
            owners.note_step(step_range(self._step[0]), self._step[1])
        self._step = number, now_us()
        self._is_full = False
        owners.begin_step(number)

    @_harmless
    def call_begins(self, owners: OwnerLedger, module: nn.Module, args: Any, name: str | None) -> None:
        root = self._roots.of(module)
        if root is not None and name is not None:
            self._roots.name(root, name)
        if not self._notes_steps:
            return
        if root is not None:
            owners.note_module(root, self._roots.prefix(root))
        owners.note_inputs(_inputs(args, "input", _NESTING))

    @_harmless
    def call_ends(self, owners: OwnerLedger, keywords: Any) -> None:
        if self._notes_steps:
            owners.note_inputs(_inputs(keywords, "input", _NESTING))

    @_harmless
    def backward_begins(self, owners: OwnerLedger, tensors: Any) -> None:
        if self._notes_steps:
            owners.note_saved(tensors)

    @_harmless
    def recompute_ends(self, owners: OwnerLedger, kept: Callable[[], list[Tensor]]) -> None:
        if self._notes_steps:
            owners.note_kept(kept())

    @_harmless
    def runs_for(self, _owners: OwnerLedger, phase: str | None, module: str | None) -> None:
        if self._writes_text:
            write_text(phase, module)

    @_harmless
    def optimizer_begins(self, owners: OwnerLedger, optimizer: Optimizer) -> None:
        self._optimizers.add(optimizer)
        if not self._notes_steps:
            return
        names = self._roots.parameter_names()
        parameters = parameters_of(optimizer)
        owners.note_gradients((names.get(parameter, _OUTSIDE), parameter) for parameter in parameters)

    @_harmless
    def optimizer_ends(self, owners: OwnerLedger, optimizer: Optimizer) -> None:
        if self._notes_steps:
            owners.note_optimizer(optimizer, self._roots.parameter_names())

    def _begin(self) -> None:
        """Begin to record; CUDA is being initialised, no device has a context yet, and none is made here."""
        if self._is_over or self.owners is not None:
            return
        try:
            self._open_files()
            self._writes_text = hasattr(torch._C, "_cuda_setMemoryMetadata")
            switch_on(self._options.stacks, self._options.max_entries)
            call_when_full(self._when_full)
            for name in _RESETS:
                patch(name, call_between(self._note_peaks, None))
            for name in _RECORDS:
                patch(name, call_between(self._leave_to_script, None))
        except Exception as error:
            self.give_up(error)

    def _open_files(self) -> None:
        """Open the ledger under this rank's name, or, where another process has that, under this process's."""
        names = [name_of_rank(name, int(os.environ.get("RANK", "0"))) for name in (SNAPSHOT, OWNERS)]
        if (self._run / names[1]).exists() or _partial(self._run / names[1]).exists():
            names = [name.replace(".", f".{os.getpid()}.", 1) for name in (SNAPSHOT, OWNERS)]
        self._files = self._run / names[0], self._run / names[1]
        self.owners = OwnerLedger(_partial(self._files[1]))
        if torch.cuda.is_initialized():  # the recording begins in the middle of the program
            self.owners.note_figures(START)

    @_harmless
    def _note_peaks(self, owners: OwnerLedger) -> None:
        owners.note_figures("before the script reset the peaks", only_higher=not self._notes_steps)

    @_harmless
    def _leave_to_script(self, _owners: OwnerLedger) -> None:
        self._is_scripts_own = True
        # After the recorded steps the snapshot of them has been written.
        self._lacks_events = self._notes_steps or not self.follows_modules

    @_harmless
    def _when_full(self, owners: OwnerLedger, device: int) -> None:
        """Handle a failed allocation; the script may catch the error and go on."""
        self._failed_allocations += 1
        names = self._roots.parameter_names()
        for model in self._roots.list():
            owners.note_module(model, self._roots.prefix(model))
        # Other devices' gradients may be changing on other threads.
        owners.note_gradients(
            (name, parameter) for parameter, name in names.items() if parameter.device.index in {device, None}
        )
        for optimizer in list(self._optimizers):
            owners.note_optimizer(optimizer, names)
        if running_graph() == -1:  # in a backward pass others may be freeing what would be read
            with suppress(Exception):  # the snapshot matters more
                owners.note_saved(tensors_at_hand())
        self._take(_OUT_OF_MEMORY)
        self._is_full = self._is_of_failure = self.owners is not None

    @_harmless
    def _take(self, owners: OwnerLedger, moment: str) -> None:
        assert self._files is not None
        owners.note_figures(moment)
        dump(self._files[0])
        if _partial(self._files[1]).exists():
            os.replace(_partial(self._files[1]), self._files[1])

    def _stop(self) -> None:
        self._is_over = True
        if self.owners is None:
            return
        owners, self.owners = self.owners, None
        self._peak_bytes = owners.allocated_peak_bytes
        restore(*_RESETS, *_RECORDS)
        call_when_full(None)
        if not self._is_scripts_own:
            record_in_torch(False)
            torch.cuda.memory._record_memory_history(None)
        try:
            owners.close()
        except OSError as error:  # what could not be written before is tried again
            self._failure = self._failure or error.strerror or str(error)


def _partial(path: Path) -> Path:
    return path.with_name(f"{PARTIAL}{path.name}")


def _inputs(value: Any, name: str, nesting: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.grad_fn is None and not isinstance(value, nn.Parameter):
            yield name, value
    elif nesting and isinstance(value, dict):
        for key, part in value.items():
            yield from _inputs(part, str(key), nesting - 1)
    elif nesting and isinstance(value, list | tuple):
        for part in value:
            yield from _inputs(part, name, nesting - 1)


def switch_on(stacks: str, max_entries: int) -> None:
    """Begin to record the allocator's events, and profkit's ranges with them."""
    options: dict[str, Any] = {"enabled": "all", "context": "alloc", "stacks": stacks, "max_entries": max_entries}
    known = signature(torch.cuda.memory._record_memory_history).parameters
    # Older torch keeps annotations of the recording thread alone, or none.
    for name in ("clear_history", "global_record_annotations"):
        if name in known:
            options[name] = True
    torch.cuda.memory._record_memory_history(**options)
    record_in_torch(True)


def call_when_full(full: Callable[[int], None] | None) -> None:
    """Call ``full(device)`` from now on whenever an allocation fails; None: call nothing.

    The failing allocation is still on the stack then: what filled the memory is all there. torch keeps an observer to
    the process's end, so there is one for all recordings.
    """
    _observer.full = full
    if not _observer.is_attached:
        torch._C._cuda_attach_out_of_memory_observer(lambda device, *_: _observer.full and _observer.full(device))
        _observer.is_attached = True


_observer = SimpleNamespace(full=None, is_attached=False)


def dump(path: Path) -> None:
    """Write the allocator's snapshot as a pickle; ``path`` appears whole or not at all."""
    with whole_file(path) as partial, partial.open("wb") as file:
        pickle.dump(torch.cuda.memory._snapshot(), file, protocol=_PROTOCOL)


def write_text(phase: str | None, module: str | None) -> None:
    """Have the allocator write ``profkit:PHASE:MODULE`` into what this thread allocates from now on, or nothing.

    MODULE is empty outside every module; a module outside every phase runs forward. A text of the script's own stays.
    """
    text = "" if phase is None and module is None else f"{MEMORY_TEXT}{phase or FORWARD}:{module or ''}"
    before = torch.cuda.memory._get_memory_metadata()
    if not before or before.startswith(MEMORY_TEXT):
        torch.cuda.memory._set_memory_metadata(text)
