"""Backward passes: the calls that begin them, and ranges for modules' backward work by hooks on the graph's own nodes.

Full backward hooks of modules raise where something changes a module's output in place (pytorch issue 61519). A hook
that runs before a node holds nothing, changes nothing, and fires on the thread that runs the node.

Nodes are marked also by who made them where no module's inputs and outputs show it (`OutsideNodes`): their backward
must not run in the range of whichever module was entered last.

- What the script computes between calls of modules, down to the modules' outputs: a node's sequence number says whether
  it was made while an outermost call ran.
- A second derivative's nodes, which autograd makes while it works out the first one: what the graph behind the first
  derivative has more than the graph before it had. ``torch.func`` always asks for such a graph, and mostly drops it:
  within its transforms nothing is marked.

Both variants of ``torch.utils.checkpoint`` compute activations again in a backward pass. The one without reentrance
keeps a function that computes again what the graph's nodes ask for; the reentrant one is a node that runs the block
again and then the backward pass of what it got. In both, only the function that runs again is wrapped: what it
computes, and when, stays the same. Of others' checkpoints (DeepSpeed, Megatron) a module that is called in a backward
pass with gradients on is what shows.
"""

from __future__ import annotations

import functools
import sys
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import fields, is_dataclass
from inspect import signature
from types import SimpleNamespace
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from profkit.capture.compilations import is_compiling
from profkit.capture.patches import outside_dynamo, patch

MARK = "profkit"
"""What the notes on a marked node hold."""
_NESTING = 4
_CALLS = 1000
"""Of how many of the last outermost calls the numbers are kept."""

NodeHook = Callable[[Any], None]
"""Is called with a gradient or nothing before a node runs: the call that made the node."""


next_number: Callable[[], int] = torch.autograd._get_sequence_nr
"""Returns the sequence number of the node that this thread makes next."""


class Carrier:
    """What carries hooks to nodes, and knows by their sequence numbers who made them: each thread needs one of its own.

    ``passed`` is the number of the first node that was made since its thread's calls last passed anything on.
    """

    __slots__ = ("_begin", "_newest", "_tensor", "own", "passed", "spans")

    def __init__(self) -> None:
        self.passed = 0
        self.spans: deque[tuple[int, int]] = deque(maxlen=_CALLS)
        """Of each outermost call the number of its first node, and of the first one after it."""
        self.own: deque[tuple[int, int, NodeHook]] = deque(maxlen=_CALLS)
        """The first of the nodes that a call made and passed on to nobody, the first after them, and the call."""
        self._begin = 0
        self._newest = -1
        with torch.inference_mode(False):
            self._tensor = torch.empty(0, device="cpu")

    def carry(self, node: Any, hooks: dict[int, NodeHook]) -> None:
        """Have ``hooks`` called before the node runs.

        As `Tensor.register_hook` does: what a tensor has for hooks is what the node takes over. `Node.register_prehook`
        makes a handle for each, which takes longer than all the rest of a range.
        """
        self._tensor._backward_hooks = hooks
        node._register_hook_dict(self._tensor)

    def mark(self, node: Any, hook: NodeHook) -> None:
        """Have ``hook`` called before the node runs, unless the node is marked already."""
        notes = node.metadata
        if MARK in notes:
            return
        notes[MARK] = True
        # As `carry` does, without a further call for each call of a module.
        self._tensor._backward_hooks = {0: hook}
        node._register_hook_dict(self._tensor)
        number = node._sequence_nr()
        if number > self._newest:  # noqa: PLR1730  a call of max takes longer
            self._newest = number

    def mark_nodes(self, value: Any, hook: NodeHook, nesting: int = _NESTING) -> None:
        """Call ``hook`` before the backward of each node that made a tensor in ``value``.

        ``value`` is a tensor, or holds some: a list, tuple, dict or dataclass. A node keeps the first hook that it is
        marked with: that of the innermost call in whose forward it was made, because what a module returns is seen as
        its output before it is seen as the output of the module around it, or as the next one's input.
        """
        if isinstance(value, Tensor):
            node = value.grad_fn
            if node is not None:
                self.mark(node, hook)
        elif not nesting or value is None:
            return
        elif isinstance(value, list | tuple):
            for part in value:
                self.mark_nodes(part, hook, nesting - 1)
        elif isinstance(value, dict):
            for part in value.values():
                self.mark_nodes(part, hook, nesting - 1)
        elif is_dataclass(value) and not isinstance(value, type):
            for field in fields(value):
                self.mark_nodes(getattr(value, field.name, None), hook, nesting - 1)

    def call_begins(self) -> None:
        self._begin = self.passed = next_number()

    def call_ended(self) -> None:
        self.spans.append((self._begin, next_number()))

    def passes(self, values: Iterable[Any], hook: NodeHook, call: NodeHook | None, end: int) -> None:
        """``call`` calls another module or ends, and passes on ``values``, which are marked with ``hook``.

        Of the nodes that it made itself since the last such moment, backward runs the last one first. ``end`` is the
        number of the node that is made next.
        """
        for value in values:
            # As `mark_nodes` does of a tensor, twice for each call of a module: here it costs no further call.
            if not isinstance(value, Tensor):
                self.mark_nodes(value, hook)
            elif (node := value.grad_fn) is not None:
                self.mark(node, hook)
        if end != self.passed:
            if call is not None and self._newest != end - 1:
                self.own.append((self.passed, end, call))
            self.passed = end
        self._newest = -1


def is_marked(node: Any) -> bool:
    return MARK in node.metadata


running_graph: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the backward pass that this thread runs, -1 if none."""


def watch_graph_end(
    tensors: Iterable[Any], callback: Callable[[], None], carrier: Carrier
) -> Callable[[], None] | None:
    """Call ``callback`` once the backward pass of ``tensors`` that begins now has run all its nodes.

    It comes before what was to be called at the pass's end by nodes that ran, such as DDP's and FSDP's waits for
    reductions. Return what ends the watch; None where there is nothing to watch, or Dynamo compiles backward passes.
    """
    if getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "compiled_autograd_enabled", False):
        return None
    for one in tensors:
        node = one.grad_fn if isinstance(one, Tensor) else None
        if node is not None:
            hooks = {0: lambda _gradient: at_graph_end(callback)}
            carrier.carry(node, hooks)
            return hooks.clear
    return None


def at_graph_end(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


Begins = Callable[[object, Sequence[Any]], None]
Ends = Callable[[object, Any], None]


def watch_backward_calls(begins: Begins, ends: Ends) -> None:
    """Call ``begins(key, tensors)`` before each backward call of this process and ``ends(key, result)`` after it.

    ``tensors`` holds what is differentiated: a tensor, or a sequence of them. ``result`` is what the call returns, None
    if it raised. ``key`` is another object for each call.
    """
    for target in ("torch.autograd.backward", "torch.autograd.grad"):
        patch(target, lambda backward: _watched(backward, begins, ends))


def is_creating_graph() -> bool:
    """Return whether a backward call runs, or is beginning or ending, that makes a graph for a second derivative."""
    return bool(_creating_graph.count)


def _watched(backward: Callable[..., Any], begins: Begins, ends: Ends) -> Callable[..., Any]:
    names = list(signature(backward).parameters)
    place = names.index("create_graph")

    def begun(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, bool] | None:
        if is_compiling():
            return None
        key, tensors = object(), args[0] if args else kwargs.get(names[0])
        creates_graph = bool(args[place] if len(args) > place else kwargs.get("create_graph"))
        _creating_graph.count += creates_graph
        begins(key, (tensors,))
        return key, creates_graph

    def ended(key: object, creates_graph: bool, result: Any) -> None:
        ends(key, result)
        _creating_graph.count -= creates_graph

    def watched(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return backward(*args, **kwargs)
        call = outside_dynamo(begun, args, kwargs)
        if call is None:
            return backward(*args, **kwargs)
        result = None
        try:
            result = backward(*args, **kwargs)
            return result
        finally:
            outside_dynamo(ended, *call, result)

    return watched


_creating_graph = SimpleNamespace(count=0)
"""How many calls that make a graph run now: autograd's threads do not say for which call they work."""


_LEAF = "torch::autograd::AccumulateGrad"


class OutsideNodes:
    """Marks what no module's inputs and outputs show, where a backward call begins and ends."""

    def __init__(self) -> None:
        self._before: dict[object, set[Any]] = {}

    def backward_begins(self, key: object, tensors: Sequence[Any], carrier: Carrier, here: NodeHook) -> None:
        """A backward call begins; ``tensors`` holds what it differentiates."""
        # As custom functions of autograd ask. To look at the stack of transforms would make one for this thread, which
        # autograd copies from then on for each node that it runs.
        if torch._C._are_functorch_transforms_active():
            return
        if carrier.spans:
            for node in _made_between_calls(_nodes_of(tensors[0]), carrier):
                carrier.mark(node, here)
        if carrier.own:
            for node, call in _made_by_calls(_nodes_behind(tensors[0]), carrier):
                carrier.mark(node, call)
        if is_creating_graph():
            self._before[key] = _nodes_behind(tensors[0])

    def backward_ended(self, key: object, gradients: Any, carrier: Carrier, here: NodeHook) -> None:
        """It has ended, and returned ``gradients``, behind which is the second derivative's work."""
        before = self._before.pop(key, None)
        if before is not None:
            for node in _nodes_behind(gradients, before):
                carrier.mark(node, here)


def _made_between_calls(nodes: Iterable[Any], carrier: Carrier) -> Iterator[Any]:
    waiting, seen = list(nodes), set()
    spans = list(carrier.spans)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or is_marked(node) or node.name() == _LEAF:
            continue
        seen.add(node)
        number = node._sequence_nr()
        at = bisect_right(spans, (number, number)) - 1
        if at < 0 or number >= spans[at][1]:
            waiting += [behind for behind, _ in node.next_functions]
            yield node


def _made_by_calls(nodes: Iterable[Any], carrier: Carrier) -> Iterator[tuple[Any, NodeHook]]:
    own = list(carrier.own)
    ends = [end for _, end, _ in own]
    for node in nodes:
        number = node._sequence_nr()
        at = bisect_right(ends, number)
        if at < len(own) and own[at][0] <= number:
            yield node, own[at][2]


def _nodes_of(value: Any) -> list[Any]:
    tensors = value if isinstance(value, list | tuple) else [value]
    return [one.grad_fn for one in tensors if isinstance(one, Tensor)]


def _nodes_behind(value: Any, known: Set[Any] = frozenset()) -> set[Any]:
    """Leaves' own nodes are left out: they stay from step to step."""
    waiting = _nodes_of(value)
    found: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in known and node not in found and node.name() != _LEAF:
            found.add(node)
            waiting += [behind for behind, _ in node.next_functions]
    return found


class RecomputeListener(Protocol):
    """Is called around what a backward pass computes again, on the thread that does it."""

    def call_to_recompute(self) -> Any:
        """Return the call of a module or function in whose forward pass a part begins that will be computed again."""

    def recompute_begins(self, key: object, call: Any) -> None:
        """What ran in ``call`` is about to be computed again; ``key`` is the same where it ends."""

    def recompute_ends(self, key: object, kept: Callable[[], list[Tensor]]) -> None:
        """It has been computed again, or has been stopped early, or raised.

        ``kept`` returns the tensors that are kept for the backward pass now, where no graph does that.
        """


def watch_recompute(listener: RecomputeListener) -> None:
    """Call ``listener`` for each checkpoint that is made from now on, until the process ends."""
    patch("torch.utils.checkpoint._CheckpointFrame.__init__", lambda init: _with_watched_frame(init, listener))
    patch("torch.utils.checkpoint.CheckpointFunction.forward", lambda run: _with_watched_function(run, listener))


def is_recomputing() -> bool:
    """Return whether a checkpoint that is watched computes something again on this thread."""
    return _running.depth > 0


def is_computed_again() -> bool:
    """Return whether somebody else's checkpoint computes something again on this thread."""
    is_in_backward = running_graph() != -1
    return is_in_backward and torch.is_grad_enabled() and not is_creating_graph() and not is_recomputing()


def is_first_pass() -> bool:
    """Return whether torch's reentrant checkpoint runs its first forward pass, which it does with gradients off."""
    return _running.first_passes > 0


class _Running(threading.local):
    depth = 0
    first_passes = 0


_running = _Running()


def _with_watched_frame(init: Callable[..., None], listener: RecomputeListener) -> Callable[..., None]:
    def watched(frame: Any, *args: Any, **kwargs: Any) -> None:
        init(frame, *args, **kwargs)
        if not torch.compiler.is_compiling() and hasattr(frame, "recompute_fn"):
            # The frame must not hold itself.
            kept = functools.partial(_kept_by, ref(frame))
            frame.recompute_fn = _seen_again(frame.recompute_fn, listener, kept)

    return watched


def _with_watched_function(forward: Callable[..., Any], listener: RecomputeListener) -> Callable[..., Any]:
    def watched(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        trains = any(ctx.needs_input_grad)
        _running.first_passes += trains
        try:
            return forward(ctx, _seen_again(function, listener), *args)
        finally:
            _running.first_passes -= trains

    return watched


def _kept_by(reference: ref[Any]) -> list[Tensor]:
    frame = reference()
    if frame is None:
        return []
    groups = list(getattr(frame, "recomputed", {}).values())
    return [tensor for group in groups for tensor in list(group.values()) if isinstance(tensor, Tensor)]


def _seen_again(
    function: Callable[..., Any], listener: RecomputeListener, kept: Callable[[], list[Tensor]] = list
) -> Callable[..., Any]:
    call = listener.call_to_recompute()

    def watched(*args: Any, **kwargs: Any) -> Any:
        # The reentrant variant also runs its first forward pass through here, with gradients off.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        key = object()
        listener.recompute_begins(key, call)
        _running.depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            _running.depth -= 1
            listener.recompute_ends(key, kept)

    return watched
