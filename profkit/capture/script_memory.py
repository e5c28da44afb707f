"""The allocator's recording in a script's own process: from CUDA's first use to the end of the last measured step.

Nothing here may change what the script does: CUDA is never initialised for it, no tensor is held, and whatever fails
ends the recording alone, to be told by the launcher.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from profkit.capture.backward_nodes import mark_nodes
from profkit.capture.backward_owners import clear_owner, knows_owners, set_owner
from profkit.capture.hooks import Watcher
from profkit.capture.memory import OUT_OF_MEMORY, call_when_full, dump, switch_off, switch_on
from profkit.capture.module_names import Roots
from profkit.capture.owners import OwnerLedger, now_us, when_saved
from profkit.capture.whole_files import partial_of
from profkit.models.workload import MemoryOptions
from profkit.names import LOSS, step_range
from profkit.run_directory import LEDGER, SNAPSHOT, name_of_rank

Method = TypeVar("Method", bound=Callable[..., None])

_NESTING = 4
_OUTSIDE = "(a parameter outside the modules)"
_RESETS = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")
_RECORDS = ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy")


def _harmless(method: Method) -> Method:
    """Do nothing while nothing is recorded; let what fails end the recording, and never reach the script."""

    @functools.wraps(method)
    def guarded(self: ScriptMemory, *args: Any) -> None:
        if self.owners is None:
            return
        try:
            method(self, *args)
        except Exception as error:
            self.give_up(error)

    return guarded  # type: ignore[return-value]


class _OnThread(threading.local):
    """What this thread has open: the context that notes saved tensors, during an outermost module call."""

    saving: AbstractContextManager[Any] | None = None


class ScriptMemory(Watcher):
    """Records the allocator of this process into ``run``: `wait_for_cuda` once, `finish` at the end."""

    def __init__(self, run: Path, options: MemoryOptions) -> None:
        self._run = run
        self._options = options
        self.owners: OwnerLedger | None = None
        """The ledger, while the allocator is recorded."""
        self._files: tuple[Path, Path] | None = None
        self._roots = Roots()
        self._step: tuple[int, int] | None = None
        self._on_thread = _OnThread()
        self._patches = ExitStack()
        self._is_over = self._is_full = self._is_scripts_own = False
        self._peak_bytes = 0
        self._failure: str | None = None

    def wait_for_cuda(self) -> None:
        """Begin to record when this process first uses CUDA, before it can have allocated anything; maybe never."""
        torch.cuda._lazy_call(self._begin)

    def finish(self) -> None:
        """Write the snapshot, unless that of an allocation that failed in this very step is there; record no more."""
        if not self._is_full:
            self._take("dump")
        self._stop()

    def forget(self) -> None:
        """Do nothing more in this process: it is a forked copy, and the files are the other one's."""
        self._is_over = True
        self.owners = None

    def give_up(self, error: Exception) -> None:
        """Record no more because of ``error``; what is half written goes."""
        self._failure = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        self._stop()
        for path in self._files or ():
            partial_of(path).unlink(missing_ok=True)

    def result(self) -> dict[str, Any] | None:
        """Return what the launcher is to know; None if this process never used CUDA."""
        if self._files is None and self._failure is None:
            return None
        is_there = self._files is not None and self._files[0].exists()
        return {
            "snapshot": self._files[0].name if self._files and is_there else None,
            "allocated_peak_bytes": self._peak_bytes,
            "failure": self._failure,
            "script_records": self._is_scripts_own,
        }

    @_harmless
    def boundary(self, number: int) -> None:
        """Step ``number`` begins; the one before it has ended."""
        assert self.owners is not None
        if self._step is not None:
            self.owners.note_step(step_range(self._step[0]), self._step[1])
        self._step = number, now_us()
        self._is_full = False
        self.owners.begin_step(number)

    @_harmless
    def call_begins(self, module: nn.Module, args: Any) -> None:
        assert self.owners is not None
        root = self._roots.of(module)
        if root is not None:
            self.owners.note_module(root)
        self.owners.note_inputs(_inputs(args, "input", _NESTING))
        # Compiled code saves what it likes, and would be compiled again.
        if self._options.saved and torch.is_grad_enabled() and type(module).__name__ != "OptimizedModule":
            self._on_thread.saving = when_saved(self._note_saved)
            self._on_thread.saving.__enter__()

    def call_ends(self, keywords: Any) -> None:
        saving, self._on_thread.saving = self._on_thread.saving, None
        if saving is not None:
            saving.__exit__(None, None, None)
        self._note_keywords(keywords)

    @_harmless
    def backward_begins(self, tensors: Any) -> None:
        if knows_owners():
            # What runs until a module's backward is entered is the loss's own.
            mark_nodes(tensors, None, lambda _: self.backward_enters(LOSS))

    @_harmless
    def backward_enters(self, name: str | None) -> None:
        if knows_owners():
            set_owner(name or "")

    @_harmless
    def backward_ends(self) -> None:
        if knows_owners():
            clear_owner()

    @_harmless
    def optimizer_begins(self, optimizer: Optimizer) -> None:
        assert self.owners is not None
        names = self._roots.parameter_names()
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self.owners.note_gradients((names.get(parameter, _OUTSIDE), parameter) for parameter in parameters)

    @_harmless
    def optimizer_ends(self, optimizer: Optimizer) -> None:
        assert self.owners is not None
        self.owners.note_optimizer(optimizer, self._roots.parameter_names())

    def _begin(self) -> None:
        """Begin to record; CUDA is being initialised, no device has a context yet, and none is made here."""
        if self._is_over or self.owners is not None:
            return
        try:
            self._open_files()
            switch_on(self._options.stacks, self._options.max_entries)
            call_when_full(self._when_full)
            for name in _RESETS:
                self._tell_before(name, lambda: self._note_figures("before the script reset the peaks"))
            for name in _RECORDS:
                self._tell_before(name, self._leave_to_script)
        except Exception as error:
            self.give_up(error)

    def _open_files(self) -> None:
        """Open the ledger under this rank's name, or, where another process has that, under this process's."""
        names = [name_of_rank(name, int(os.environ.get("RANK", "0"))) for name in (SNAPSHOT, LEDGER)]
        if (self._run / names[1]).exists() or partial_of(self._run / names[1]).exists():
            names = [name.replace(".", f".{os.getpid()}.", 1) for name in (SNAPSHOT, LEDGER)]
        self._files = self._run / names[0], self._run / names[1]
        self.owners = OwnerLedger(partial_of(self._files[1]), None, now_us(), None)

    def _tell_before(self, name: str, tell: Callable[[], None]) -> None:
        """Have ``tell`` run before each of the script's calls of a function of torch's."""
        function = getattr(torch._C, name, None)
        if function is None:
            return

        @functools.wraps(function)
        def told(*args: Any, **kwargs: Any) -> Any:
            tell()
            return function(*args, **kwargs)

        setattr(torch._C, name, told)
        self._patches.callback(setattr, torch._C, name, function)

    @_harmless
    def _note_figures(self, moment: str) -> None:
        assert self.owners is not None
        self.owners.note_figures(moment)

    @_harmless
    def _leave_to_script(self) -> None:
        self._is_scripts_own = True

    @_harmless
    def _note_saved(self, tensor: Tensor) -> None:
        assert self.owners is not None
        self.owners.note_saved(tensor)

    @_harmless
    def _note_keywords(self, keywords: Any) -> None:
        assert self.owners is not None
        self.owners.note_inputs(_inputs(keywords, "input", _NESTING))

    @_harmless
    def _when_full(self, device: int) -> None:
        """An allocation fails; the script may catch that and go on."""
        assert self.owners is not None
        # Other devices' gradients may be changing on other threads.
        parameters = self._roots.parameter_names().items()
        self.owners.note_gradients((name, one) for one, name in parameters if one.device.index in {device, None})
        self._take(OUT_OF_MEMORY)
        self._is_full = True

    @_harmless
    def _take(self, moment: str) -> None:
        assert self.owners is not None
        assert self._files is not None
        self.owners.note_figures(moment)
        dump(self._files[0])
        if partial_of(self._files[1]).exists():
            os.replace(partial_of(self._files[1]), self._files[1])

    def _stop(self) -> None:
        self._is_over = True
        if self.owners is None:
            return
        owners, self.owners = self.owners, None
        self._peak_bytes = owners.allocated_peak_bytes
        self._patches.close()
        if not self._is_scripts_own:
            switch_off()
        try:
            owners.close()
        except OSError as error:  # what could not be written before is tried again
            self._failure = self._failure or str(error)


def _inputs(value: Any, name: str, nesting: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a call's arguments that no recorded operation made, with their names."""
    if isinstance(value, Tensor):
        if value.grad_fn is None and not isinstance(value, nn.Parameter):
            yield name, value
    elif nesting and isinstance(value, dict):
        for key, part in value.items():
            yield from _inputs(part, str(key), nesting - 1)
    elif nesting and isinstance(value, list | tuple):
        for part in value:
            yield from _inputs(part, name, nesting - 1)
