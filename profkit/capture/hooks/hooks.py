"""Ranges and times for steps, phases and modules of any training script, without a change to it.

A wrapper around every call of a module opens and closes them, wrappers around backward calls and around what torch
itself puts around every optimizer's ``step``, and hooks on the graph's nodes for what runs on the autograd thread. What
a checkpoint computes again has a range of its own under ``backward``. A phase that the script annotates itself gets no
second range, and a function that it annotates has its backward range as a module has. The hooks change no value and
keep no tensor; what fails in them ends them, and never reaches the script.

While Dynamo traces they do nothing: of a compiled model the module that was compiled is annotated as a whole, forward
and backward; what its generated code launches has ranges of its own, which `profkit.capture.compiled` opens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from profkit.annotation import RangeObserver, ignore_ranges, leave_profiler_out, observe_ranges
from profkit.capture.hooks import Call, NoCall
from profkit.capture.hooks.backward_nodes import (
    OutsideNodes,
    at_graph_end,
    is_computed_again,
    is_first_pass,
    next_number,
    running_graph,
    watch_backward_calls,
    watch_graph_end,
    watch_recompute,
)
from profkit.capture.hooks.graph_nodes import GraphNodes, watch_graphs
from profkit.capture.hooks.module_calls import (
    Generation,
    ReplicaCall,
    StepListener,
    Watcher,
    observe_module_calls,
    watch_replicas,
)
from profkit.capture.hooks.module_names import UNNAMED, ModuleNames, unwrap
from profkit.capture.hooks.open_ranges import OpenOnThread, OpenRanges
from profkit.capture.hooks.optimizer_calls import unwatch_steps, watch_optimizers
from profkit.capture.hooks.range_log import LiveLog, watch_script_ranges
from profkit.capture.patches import restore
from profkit.capture.steps.conditions import UsedOptimizers, autocast_dtypes
from profkit.capture.steps.data_loading import DataLoading
from profkit.capture.steps.policy import Boundaries, StepPolicy, has_parameters, is_in_training, is_loss_module
from profkit.capture.steps.times import PhaseClock
from profkit.names import (
    BACKWARD,
    DATA,
    FORWARD,
    INFERENCE,
    LOSS,
    OPTIMIZER,
    PHASES,
    RECOMPUTE,
    REPLICA,
    UNFINISHED,
    step_range,
)
from profkit.run.compiled_code import CapturedGraph

Method = TypeVar("Method", bound=Callable[..., None])

_TIMED = (DATA, *PHASES)
_STEP, _LOADER, _UNFINISHED, _ONE_OPTIMIZER = object(), object(), object(), object()
"""Keys of entries among the open ranges."""

is_dynamo_compiling = torch.compiler.is_dynamo_compiling
is_tracing = torch._C._is_tracing


def _harmless(method: Method) -> Method:
    """Do nothing while Dynamo or torch.jit traces; a failure ends the hooks and never reaches the script."""

    @functools.wraps(method)
    def guarded(self: Hooks, *args: Any, **kwargs: Any) -> None:
        # As `torch.compiler.is_compiling` does, without its calls; Dynamo knows the answer of the first.
        if is_dynamo_compiling() or self.is_over or torch.compiler._is_compiling_flag or is_tracing():
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.fail(error)

    return guarded  # type: ignore[return-value]


class Hooks(RangeObserver):
    """The hooks of this process. `install` once; ranges appear between `start` and `stop`.

    What ends a step is for `StepPolicy` to say; ``step_on`` is passed on to it.

    Args:
        depth: modules with at most this many parts in their dotted names get a range; 0: the outermost alone; None:
            none at all; `BY_TREE`: as `reach_by_tree` says.
        keep_graph: is called with what was captured into each CUDA graph; None: nobody asks.
        counts_work: whether somebody may ask what a CUDA graph computes.
        counts_steps: False where the listener knows the steps: they are not counted then, and have no ranges.
    """

    def __init__(
        self,
        listener: StepListener,
        depth: int | None,
        step_on: str | None = None,
        watcher: Watcher | None = None,
        *,
        counts_steps: bool = True,
        keep_graph: Callable[[CapturedGraph], None] | None = None,
        counts_work: bool = False,
    ) -> None:
        self._listener = listener
        self._watcher = watcher or Watcher()
        self._knows_owners = self._watcher.follows_modules
        self.is_over = False
        self.names = ModuleNames(depth)
        self._parts = self.names.parts
        self.log = LiveLog()
        runs_for = self._watcher.runs_for if self._watcher.follows_modules else None
        self.on_thread = OpenOnThread(self, runs_for, self.log)
        self._is_started = self.is_recording = False
        self._nodes = GraphNodes(self, keep_graph, counts_work=counts_work)
        self._replicas: dict[int, Call | None] = {}
        self.steps = StepPolicy(step_on, counts=counts_steps)
        self.clock = PhaseClock()
        """The time of backward passes and optimizers' steps, once it is started."""
        self.loading = DataLoading(self._data_begins, self._data_ends)
        self._generation = Generation(
            partial(self._shown, self.steps.generate_begins), partial(self._shown, self.steps.generate_ends)
        )
        self._no_call = NoCall(self)
        self._outside = OutsideNodes()
        self.autocast_dtypes: set[str] = set()
        """The types that autocast computed in around the modules called while ranges were open."""
        self.has_detected_anomalies = self.has_evaluated_without_autocast = False
        self._trained_kinds: set[type[nn.Module]] = set()
        self.optimizers = UsedOptimizers()
        self._boundaries = Boundaries(self._begin_step, lambda: self.on_thread.ranges.scripts)
        self._is_interrupted = False
        self.times_waits = False
        """Whether the clock also notes when a backward pass has nothing left to do but wait for other ranks."""
        self.on_backward: Callable[[], None] | None = None
        """Is called on each thread that begins a backward pass, if anybody asks."""
        self.on_call: Callable[[dict[str, Any]], None] | None = None
        """Is called with the keyword arguments of each outermost call of a module, if anybody asks."""
        self.on_optimizer: Callable[[Optimizer], None] | None = None
        """Is called after each step of an optimizer, while its gradients are there, if anybody asks."""
        self._unwatch_graph: Callable[[], None] | None = None
        self.begun = -1
        """The number of the step that runs now, counted from 0; -1 before the first."""

    def install(self) -> None:
        watch_optimizers(self)
        watch_backward_calls(self._backward_begins, self._backward_ends)
        watch_recompute(self)
        watch_replicas(self.replicas_begin)
        self.loading.install()
        self._generation.install()
        watch_graphs(self.steps, self._shown, self._nodes)
        watch_script_ranges(self.script_opening, self.closing, self.script_closed)
        observe_ranges(self)
        observe_module_calls(self)

    def remove(self) -> None:
        """Take everything away again that `install` brought: nothing is seen from now on."""
        self.is_over = True
        ignore_ranges(self)
        self._generation.remove()
        unwatch_steps()
        restore()

    def start(self) -> None:
        """Open ranges from now on, that of the step which is about to begin first."""
        self._is_started = self.is_recording = True

    def prepare(self) -> None:
        """Name the models that were called so far and make their ranges, before anything records: it takes a while."""
        for model in self.steps.models:
            self.name_model(model)
        self.on_thread.ranges.prepare(part.range for part in self.names.parts.values() if part.range is not None)

    def start_log(self) -> None:
        """Write ranges to profkit's own log from now on, the script's own among them, until `stop`."""
        leave_profiler_out(True)
        self.log.is_on = True

    def capture_runs(self, runs: bool) -> None:
        """Open ranges while a CUDA graph is captured too, mostly before the recording: its replays run no Python."""
        self.is_recording = (runs or self._is_started) and not self.is_over

    def begin_whole(self) -> None:
        self._shown(self.steps.begin_whole)

    @_harmless
    def mark_unfinished(self) -> None:
        opened = self.on_thread.ranges
        if self.is_recording and opened.has(_STEP):
            opened.open(_UNFINISHED, UNFINISHED)
            opened.close(_UNFINISHED)

    def stop(self) -> None:
        self.on_thread.ranges.close_all()
        self._is_started = self.is_recording = False
        if self.log.is_on:
            self.log.is_on = False
            leave_profiler_out(False)

    @_harmless
    def opening(self, name: str) -> None:
        self.on_thread.ranges.note_opening(name, name)
        if name in _TIMED:
            self.clock.begin(name)

    @_harmless
    def closing(self) -> None:
        opened = self.on_thread.ranges
        if self.is_recording and opened.is_in_scripts(_STEP):
            # Ranges close in the opposite order of their opening: the step goes on outside.
            opened.close(_STEP)
            self._is_interrupted = True

    @_harmless
    def closed(self) -> None:
        if self.on_thread.ranges.note_closed() in _TIMED:
            self.clock.end()
        self._range_closed()

    @_harmless
    def script_opening(self, name: Callable[[], str]) -> None:
        self.on_thread.ranges.note_opening(None, name() if self.log.is_on else None)

    @_harmless
    def script_closed(self) -> None:
        self.on_thread.ranges.note_closed()
        self._range_closed()

    def _range_closed(self) -> None:
        if self._is_interrupted and self.is_recording:
            self.on_thread.ranges.open(_STEP, step_range(self.begun))
        self._is_interrupted = False
        self._boundaries.range_closed()

    def calling(self, name: str) -> None:
        if running_graph() == -1 and self.on_thread.ranges.call is None:
            self._shown(self.steps.function_begins, name)

    def has_returned(self, name: str) -> None:
        if running_graph() == -1 and self.on_thread.ranges.call is None:
            self._shown(self.steps.function_ends, name)

    @_harmless
    def called(self, arguments: Any) -> None:
        opened = self.on_thread.ranges
        around = opened.call
        if opened.note_call(self) is not None and self.is_recording:
            opened.carrier.passes(arguments, around or self._no_call, around, next_number())

    @_harmless
    def returned(self, result: Any) -> None:
        opened = self.on_thread.ranges
        if self.is_recording:
            opened.carrier.passes((result,), opened.call or self._no_call, opened.call, next_number())

    def fail(self, error: Exception) -> None:
        self.is_over = True
        self.clock.stop()
        self._listener.hooks_failed(error)
        with suppress(Exception):  # the ranges themselves may be what failed
            self.stop()

    def _begin_phase(self, key: object, phase: str) -> None:
        self.clock.begin(phase)
        opened = self.on_thread.ranges
        is_wanted = self.is_recording and not opened.has_range(phase)
        opened.open(key, phase if is_wanted else None)

    def _end_phase(self, key: object) -> None:
        if self.on_thread.ranges.close(key):
            self.clock.end()

    @_harmless
    def _data_begins(self) -> None:
        self._begin_phase(_LOADER, DATA)
        self.on_thread.ranges.note_opening(None)  # torch's own range, within which no step begins

    @_harmless
    def _data_ends(self) -> None:
        self.closing()
        self.on_thread.ranges.note_closed()
        self._end_phase(_LOADER)
        self._range_closed()

    @_harmless
    def _shown(self, event: Callable[..., int | None], *what: Any) -> None:
        self._make_boundary(event(*what))

    def enter(self, opened: OpenRanges, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Call | None:
        try:
            if opened.root is None and not self.is_over and running_graph() == -1:
                return self._begin_outermost(opened, module, args, kwargs)
            if not self.is_recording:
                return None
            part = self._parts.get(id(module), UNNAMED)
            name = part.range
            if not part.is_known:
                part.is_known = True
                self.autocast_dtypes |= autocast_dtypes()
            around = opened.call
            if around is None:
                if is_computed_again():
                    opened.interrupt_backward(module, RECOMPUTE, opened.backward_call)
                    around = opened.call
            elif name is None and not self._knows_owners:
                return None
            carrier, number = opened.carrier, next_number()
            if number != carrier.passed:  # else all that is passed on was looked at where it was made
                carrier.passes((*args, kwargs) if kwargs else args, around or self._no_call, around, number)
            call = Call(name, around, self, part.owner, part.reference)
            opened.open(call, name, call)
            return call
        except Exception as error:
            self.fail(error)
            return None

    def leave(self, opened: OpenRanges, call: Call, module: nn.Module, output: Any, kwargs: dict[str, Any]) -> None:
        try:
            if self.is_recording:
                carrier, number = opened.carrier, next_number()
                if number != carrier.passed:
                    carrier.passes((output,), call, call, number)
            opened.close(call)
            root = opened.root
            if root is None:
                opened.resume_backward(module)
            elif root is call:
                self._end_outermost(opened, call, module, kwargs)
        except Exception as error:
            self.fail(error)

    def _end_outermost(self, opened: OpenRanges, call: Call, module: nn.Module, kwargs: dict[str, Any]) -> None:
        opened.root = None
        if isinstance(call, ReplicaCall):
            return
        if self.is_recording:
            opened.carrier.call_ended()
        self._end_phase(FORWARD)
        self._watcher.call_ends([kwargs])
        self._make_boundary(self.steps.call_ends(module))

    def _begin_outermost(
        self, opened: OpenRanges, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | None:
        if torch.compiler._is_compiling_flag or self.steps.is_compilers(module):
            return None
        if opened.has(_LOADER) and not has_parameters(module):
            return None  # it makes a sample ready, and is no model
        if id(module) in self._replicas:
            return self._begin_replica(opened, module)
        if self.log.is_on and self.log.is_full:
            self._listener.log_is_full()
        self._boundaries.work_begins()
        self._make_boundary(self.steps.call_begins(module))
        is_loss = is_loss_module(module)
        call, name = Call(None, opened.call, self, None, ref(module)), None
        if self.is_recording:
            part = self.names.part(module)
            if part is None:
                called = type(module).__name__ if is_loss else self.steps.name_of(module)
                part = self.names.name_root(module, called, self.steps.models)
            call, name = Call(part.range, opened.call, self, part.owner, part.reference), part.name
            self.autocast_dtypes |= autocast_dtypes()
            self.has_detected_anomalies |= torch.is_anomaly_enabled()
        self._note_evaluation(module)
        opened.root = call
        self._begin_phase(FORWARD, self._phase_of_call((module,), has_grad=torch.is_grad_enabled()))
        self._watcher.call_begins(module, args, name)
        if self.on_call is not None:
            self.on_call(kwargs)
        if self.is_recording:
            opened.carrier.call_begins()
            opened.carrier.mark_nodes((args, kwargs), call.around or self._no_call)
        opened.open(call, call.name, call)
        return call

    def _note_evaluation(self, module: nn.Module) -> None:
        """A model without gradients is evaluated if one of its class trains: an average of its weights is, too."""
        kind = type(unwrap(module))
        if torch.is_grad_enabled():
            self._trained_kinds.add(kind)
        elif not module.training and kind in self._trained_kinds:
            self.has_evaluated_without_autocast |= not autocast_dtypes()

    @_harmless
    def calls_begin(self, models: Sequence[nn.Module], *, has_grad: bool) -> None:
        """Code that was compiled of outermost calls of ``models`` begins to run: nobody sees the calls themselves."""
        self._boundaries.work_begins()
        for model in models[:-1]:
            self._make_boundary(self.steps.call_begins(model))
            self._make_boundary(self.steps.call_ends(model))
        self._make_boundary(self.steps.call_begins(models[-1]))
        for model in models:
            if self.is_recording:
                self.name_model(model)
            part = self.names.part(model)
            self._watcher.call_begins(model, (), None if part is None else part.name)
        self._begin_phase(models, self._phase_of_call(models, has_grad=has_grad))

    @_harmless
    def calls_end(self, models: Sequence[nn.Module]) -> None:
        """That code, for which `calls_begin` was given the same list, has run or raised."""
        self._end_phase(models)
        self._watcher.call_ends([])
        self._make_boundary(self.steps.call_ends(models[-1]))

    def name_model(self, model: nn.Module) -> None:
        if self.names.part(model) is None:
            self.names.name_root(model, self.steps.name_of(model), self.steps.models)

    @_harmless
    def replicas_begin(self, model: nn.Module, replicas: Sequence[nn.Module]) -> None:
        """Name the replicas' modules as the model's, and note in which call the replicas work."""
        if self.is_recording:
            self.names.name_replicas(model, replicas)
        self._replicas = dict.fromkeys(map(id, replicas), self.on_thread.ranges.call)

    def _begin_replica(self, opened: OpenRanges, module: nn.Module) -> Call:
        call = ReplicaCall(REPLICA if self.is_recording else None, self._replicas.pop(id(module)), self)
        opened.root = call
        opened.open(call, call.name, call)
        return call

    def _phase_of_call(self, models: Sequence[nn.Module], *, has_grad: bool) -> str:
        phase = self._generation.next_phase()
        # What the script itself calls its forward pass is one, with gradients or without.
        if phase is None and (has_grad or is_first_pass() or self.on_thread.ranges.has_range(FORWARD)):
            return LOSS if all(map(is_loss_module, models)) else FORWARD
        if not has_grad and any(map(is_in_training, models)):
            self.steps.note_inference()
        return phase or INFERENCE

    @_harmless
    def _backward_begins(self, key: object, tensors: Any) -> None:
        if self.on_backward is not None:
            self.on_backward()
        opened = self.on_thread.ranges
        if self.is_recording:
            self._outside.backward_begins(key, tensors, opened.carrier, opened.call or self._no_call)
        # Within a backward pass it is mostly a checkpoint's: no phase of its own, but ranges that end with it.
        if running_graph() != -1:
            self._watcher.backward_begins(tensors)
            is_computed_again = opened.has_range(RECOMPUTE)
            opened.interrupt_backward(key, BACKWARD if self.is_recording and is_computed_again else None)
            return
        self._boundaries.work_begins()
        self._make_boundary(self.steps.backward_begins())
        self._begin_phase(key, BACKWARD)
        if self.times_waits and self.clock.is_running and torch.cuda.is_initialized():
            (given,) = tensors
            given = given if isinstance(given, Sequence) else tensors
            self._unwatch_graph = watch_graph_end(given, self.clock.graph_ran, opened.carrier)
        self._watcher.backward_begins(tensors)
        if self.is_recording and self._knows_owners:
            # What runs until a module's backward is entered is the loss's own.
            opened.carrier.mark_nodes(tensors, self._no_call)

    @_harmless
    def _backward_ends(self, key: object, gradients: Any) -> None:
        opened = self.on_thread.ranges
        is_within_another = running_graph() != -1
        if is_within_another:
            opened.resume_backward(key)
        else:
            if self._unwatch_graph is not None:
                self._unwatch_graph()
                self._unwatch_graph = None
            self._end_phase(key)
        self._outside.backward_ended(key, gradients, opened.carrier, opened.call or self._no_call)
        if not is_within_another:
            self._make_boundary(self.steps.backward_ends())

    def enter_graph(self, opened: OpenRanges) -> None:
        opened.graph_task = running_graph()
        at_graph_end(self._leave_backward)

    def call_to_recompute(self) -> Call | None:
        return self.on_thread.ranges.call if self.is_recording else None

    @_harmless
    def recompute_begins(self, key: object, call: Call | None) -> None:
        """Open the range of what a checkpoint computes again, not within the backward ranges of modules."""
        if self.is_recording:
            self.on_thread.ranges.interrupt_backward(key, RECOMPUTE, call)

    @_harmless
    def recompute_ends(self, key: object, kept: Callable[[], list[Tensor]]) -> None:
        self._watcher.recompute_ends(kept)
        self.on_thread.ranges.resume_backward(key)

    @_harmless
    def _leave_backward(self) -> None:
        opened = self.on_thread.ranges
        opened.graph_task = -1
        opened.leave_backward()

    @property
    def is_in_optimizer(self) -> bool:
        """Whether an optimizer's step runs on this thread; True also where nothing is watched any more."""
        return self.is_over or self.on_thread.ranges.has(OPTIMIZER)

    @_harmless
    def optimizer_begins(self, optimizer: Optimizer, *, is_update: bool) -> None:
        self._make_boundary(self.steps.optimizer_begins(optimizer))
        self._watcher.optimizer_begins(optimizer)
        self.clock.begin(OPTIMIZER)
        self._open_optimizer(optimizer, is_update=is_update)

    @_harmless
    def optimizer_ends(self, optimizer: Optimizer, *, is_well: bool) -> None:
        self.on_thread.ranges.close(OPTIMIZER)
        self.clock.end()
        self.steps.optimizer_left()
        if is_well:
            self.optimizers.note_step(optimizer)
            if self.on_optimizer is not None:
                self.on_optimizer(optimizer)
            self._watcher.optimizer_ends(optimizer)
            self._make_boundary(self.steps.optimizer_ends(optimizer))

    def _open_optimizer(self, optimizer: Optimizer, *, is_update: bool) -> None:
        is_wanted, opened = is_update and self.is_recording, self.on_thread.ranges
        opened.open(OPTIMIZER, OPTIMIZER if is_wanted and not opened.has_range(OPTIMIZER) else None)
        own = self.steps.label(optimizer) if is_wanted else None
        if own is not None:
            opened.open(_ONE_OPTIMIZER, own)

    @_harmless
    def update_ends(self, optimizer: Optimizer) -> None:
        self.clock.pause()
        self.on_thread.ranges.close(OPTIMIZER)
        self._open_optimizer(optimizer, is_update=False)

    @_harmless
    def update_begins(self, optimizer: Optimizer) -> None:
        self.clock.resume()
        self.on_thread.ranges.close(OPTIMIZER)
        self._open_optimizer(optimizer, is_update=True)

    def _make_boundary(self, number: int | None) -> None:
        if number is not None:
            self._boundaries.due(number)

    def _begin_step(self, number: int) -> None:
        opened = self.on_thread.ranges
        opened.close(_STEP)
        self.begun = number
        self._listener.boundary(self.begun)
        if self.is_recording:
            opened.open(_STEP, step_range(self.begun))
