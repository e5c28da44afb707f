"""Counts what a script's operators do while they run: FLOPs by formula, and bytes by which memory they touch.

Of compiled code (torch.compile) `OperatorMode` sees what the compiler leaves to torch's libraries. The matrix products
of a launch are those of the graph that the code was made of (`profkit.capture.compiled.node_work`), under the modules
that the launch computes for. Where they are not known there, because a size is a symbol, what the libraries are asked
for counts. What fused kernels do besides products, and the bytes that they move, is not counted: `missing` says so. It
says "compiled code" where compiled code ran and no launch of it was seen.

The replay of a CUDA graph does what was captured (`profkit.capture.work.operator_work`); where that was not seen,
`missing` says "replayed CUDA graphs".
"""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, takewhile
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode

from profkit.annotation import RangeObserver, ignore_ranges, observe_ranges
from profkit.capture import describe_error
from profkit.capture.compiled.watch import loaded
from profkit.capture.line_samples import Place, describe, find_place
from profkit.capture.patches import patch, restore
from profkit.capture.steps.conditions import count_compiled_graphs
from profkit.capture.work import Instance, Products, WorkAccount, summarize_work
from profkit.capture.work.needless import (
    CallsApart,
    GradientFlow,
    GradientsApart,
    Masks,
    Parameters,
    RangeOf,
    SameInputs,
    TurnsApart,
)
from profkit.capture.work.operator_work import (
    Buffers,
    GraphPart,
    GraphWork,
    OperatorMode,
    OperatorWork,
    describe_call,
    replay_observers,
)
from profkit.capture.work.operators import base_name, has_other_gradient, name_arguments
from profkit.names import (
    BACKWARD,
    COUNTED,
    FORWARD,
    OPTIMIZER,
    STEP,
    WARMUP,
    LaunchPlace,
    kind_of,
    read_graph_range,
    read_launch_range,
)
from profkit.run.compiled_code import Launch
from profkit.run.work import (
    FUSED,
    INSTANCE_NORM,
    SIGNAL_CONVOLUTION,
    VOLUME_CONVOLUTION,
    DenseTable,
    OperatorLine,
    RunWork,
    UnreadGradients,
)

_CTC_LOSS = "torch.ctc_loss"
_OF_BATCH = 3
"""Scores of a batch have positions, samples and classes."""
_LOSS_OF_CLASSES = "nll_loss_forward"
_OF_TOKENS = 2
"""Tokens have a dimension of samples and one of positions."""
_OF_POSITIONS = 2
"""Scores for a loss have positions and classes."""
_IGNORED = -100
"""The target that torch's losses ignore, unless they are told another."""
_COMPILED = "compiled code"
_REPLAY = "replayed CUDA graphs"
_DENSE_GRADIENTS = ("embedding_dense_backward", "_embedding_bag_dense_backward")
_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm")
_CONVOLUTIONS = {3: SIGNAL_CONVOLUTION, 5: VOLUME_CONVOLUTION}
"""By the dimensions of a batch; a batch of images has four."""
_FUSED_ATTENTION = re.compile(r"_scaled_dot_product_\w*?attention(_for_cpu)?")
_STEP = re.compile(rf"{STEP} \d+|{WARMUP}|{COUNTED}")

_OperatorPlace = tuple[tuple[str, ...], str, str, Place]
"""The ranges around an operator by kind, its name, the type of its result, and the line that calls it."""


class _Launch:
    """A launch of compiled code that runs: its record, if there is one, and whether an operator with products ran."""

    def __init__(self, record: Launch | None) -> None:
        self.record = record
        self.is_known = record is not None and record.flops is not None
        self.has_products = False


class CompiledInstances:
    """The instances of modules that stand for launches of compiled code, on each thread."""

    def __init__(self, account: WorkAccount) -> None:
        self._account = account
        self._last: dict[int, tuple[Instance, list[tuple[str, Instance]]]] = {}

    def enter(self, thread: int, place: LaunchPlace, around: Instance) -> Instance:
        names = place.below(around.path)
        before, open_there = self._last.get(thread, (around, []))
        joined: list[tuple[str, Instance]] = []
        for name, (was, instance) in zip(names, open_there if before is around else [], strict=False):
            if name != was:
                break
            joined.append((was, instance))
        innermost = joined[-1][1] if joined else around
        for name in names[len(joined) :]:
            innermost = self._account.open(name, innermost)
            joined.append((name, innermost))
        self._last[thread] = around, joined
        return innermost

    def interrupt(self, thread: int) -> None:
        """Note that another range begins or ends on the thread: the next launch opens instances of its own."""
        self._last.pop(thread, None)


class WorkCounter(OperatorMode, RangeObserver):
    """Counts from `start` to `stop`; `content` returns the result.

    Args:
        stepped: the parameters of each optimizer that has made a step before, by its id.
        differentiated: those of which backward computes gradients.
    """

    def __init__(
        self, stepped: Mapping[int, Sequence[torch.Tensor]] | None = None, differentiated: Iterable[torch.Tensor] = ()
    ) -> None:
        super().__init__()
        self._account = WorkAccount()
        self._lock = threading.Lock()
        self._main = threading.get_ident()
        self._open: dict[int, list[Instance]] = {}
        self._compiled = CompiledInstances(self._account)
        self._launches: dict[int, list[tuple[int, _Launch]]] = {}
        self._has_seen_launch = False
        self._buffers: Buffers = {}
        self._missing: set[str] = set()
        self._lines: dict[_OperatorPlace, Counter[str]] = {}
        self._masks = Masks()
        self._looks_at_masks = False
        self._scoring: dict[int, str] = {}
        self._tables: dict[tuple[str, tuple[int, ...]], Counter[str]] = {}
        self._shared_shapes: set[tuple[int, ...]] = set()
        self._unread: dict[str, UnreadGradients] = {}
        stepped = stepped or {}
        self._needed, self._computed = GradientFlow(chain.from_iterable(stepped.values())), GradientFlow(differentiated)
        self._apart = GradientsApart(stepped)
        self._separate, self._repeated = CallsApart(self._computed.weights), SameInputs(self._computed.weights)
        self._turns = TurnsApart()
        self._model_flops = 0
        self._work: dict[tuple[str, ...], Any] = {}
        self._is_entered = False
        self._differs: str | None = None
        self.failure: str | None = None
        """Why counting ended early, and nothing of it counts; None if it did not."""

    def start(self) -> None:
        """Count from now on, on this thread and the backward passes that it begins."""
        self._main = threading.get_ident()
        observe_ranges(self)
        replay_observers.append(self._replayed)
        patch(_CTC_LOSS, self._with_lengths)
        self.__enter__()
        self._is_entered = True

    def backward_begins(self) -> None:
        """A backward pass is about to begin: leave before it, if torch would compute a gradient by another formula."""
        if self._differs is not None and self._is_entered:
            self.failure = f"counting changes the gradient of {self._differs}"
            self._leave()

    def model_called(self, kwargs: dict[str, Any]) -> None:
        """A module is called: see by its mask of (samples, positions) how much is padding, without a wait."""
        mask = kwargs.get("attention_mask")
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.is_floating_point():
            return
        self._look_at_masks(lambda masks: masks.add_samples(mask))

    def _look_at_masks(self, add: Callable[[Masks], None]) -> None:
        self._looks_at_masks = True
        try:
            add(self._masks)
        except Exception as error:  # the program goes on
            self.failure = f"looking at masks failed ({describe_error(error)})"
        finally:
            self._looks_at_masks = False

    def _with_lengths(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return `torch.ctc_loss` with lengths that lie on the host as numbers, as torch itself makes of them.

        While any mode is on it leaves them tensors, which its kernels refuse beside scores on the GPU (LossCTC.cpp).
        How much of what the model computed is padding, they say, too.
        """

        def called(
            log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *more: Any, **named: Any
        ) -> Any:
            lengths = input_lengths, target_lengths
            if any(isinstance(one, torch.Tensor) and one.device.type == "cpu" for one in lengths):
                lengths = tuple(map(_as_numbers, lengths))
            if log_probs.dim() == _OF_BATCH:
                self._look_at_masks(lambda masks: masks.add_lengths(log_probs.shape[0], lengths[0]))
            return plain(log_probs, targets, *lengths, *more, **named)

        return called

    def optimizer_stepped(
        self, optimizer: int, models: Sequence[nn.Module], range_of: RangeOf, stepped: Collection[int]
    ) -> None:
        """An optimizer's step has ended, with gradients still there; ``stepped``: the ids of all optimizers' own."""
        try:
            parameters = Parameters(models, range_of)
            self._shared_shapes |= parameters.shapes_of_shared()
            for unread in parameters.find_unread(stepped, self._computed, self._needed):
                self._unread[unread.module] = unread
            self._apart.stepped(optimizer, parameters, self._computed)
        except Exception as error:  # the program goes on
            self.failure = f"looking at gradients failed ({describe_error(error)})"

    def stop(self) -> None:
        self._leave()
        ignore_ranges(self)
        replay_observers.remove(self._replayed)
        # Where launches are known and none ran, no compiled code did.
        if count_compiled_graphs() and not loaded and not self._has_seen_launch:
            self._missing.add(_COMPILED)
        self._work = self._account.by_path(lambda key: not self._buffers[key].expired())  # type: ignore[index]
        self._buffers.clear()

    def _leave(self) -> None:
        """Take this off the thread's modes; those that the program has put on since, and will take off itself, stay."""
        if not self._is_entered:
            return
        self._is_entered = False
        restore(_CTC_LOSS)
        above = []
        while (mode := _get_current_dispatch_mode()) not in (self, None):
            above.append(mode)
            _pop_mode()
        if mode is self:
            self.__exit__(None, None, None)
        else:
            self.failure = "the step ended on another thread"
        for mode in reversed(above):
            _push_mode(mode)

    def content(self) -> RunWork:
        work = summarize_work(self._work, self._model_flops, self._missing)
        return replace(
            work,
            lines=tuple(_describe_lines(self._lines)),
            padding=self._masks.padding(),
            given_masks=tuple(self._masks.given()),
            scored_positions=tuple(self._masks.scored()),
            unread_gradients=(*self._unread.values(), *self._apart.find(self._computed)),
            tables=tuple(self._describe_tables()),
            independent_calls=tuple(self._separate.describe()),
            repeated_calls=tuple(self._repeated.describe()),
            independent_turns=tuple(self._turns.describe()),
            optimizer_steps=self._apart.steps,
        )

    def _describe_tables(self) -> Iterator[DenseTable]:
        kinds: dict[str, Counter[str]] = {}
        for (module, shape), sums in self._tables.items():
            if shape not in self._shared_shapes:
                kinds.setdefault(module, Counter()).update(sums)
        for module, sums in kinds.items():
            yield DenseTable(module, sums["rows"], sums["used"], sums["bytes"])

    def opening(self, name: str) -> None:
        with self._lock:
            thread = threading.get_ident()
            if read_graph_range(name) is None:
                self._opens(name, thread)
            else:  # no range of its own: what is replayed lies in those of the capture
                self._open.setdefault(thread, []).append(self._innermost())

    def closed(self) -> None:
        """Take note that this thread's innermost range closed; one that was open before counting began is unknown."""
        with self._lock:
            self._closes(threading.get_ident())

    def _opens(self, name: str, thread: int) -> None:
        around, place = self._innermost(), read_launch_range(name)
        if place is not None:
            self._launch(thread, place, around)
            return
        self._compiled.interrupt(thread)
        is_step = around is self._account.step and _STEP.fullmatch(name)
        instance = around if is_step else self._account.open(name, around)
        if not is_step:
            self._separate.opened(instance)
            self._repeated.opened(instance)
            self._computed.opened(instance)
        self._open.setdefault(thread, []).append(instance)

    def _closes(self, thread: int) -> None:
        stack, launches = self._open.get(thread), self._launches.get(thread)
        if launches and stack is not None and launches[-1][0] == len(stack):
            launch = launches.pop()[1]
            if not launches:
                self._launched(launch)
        else:
            self._compiled.interrupt(thread)
        if stack:
            stack.pop()

    def _replayed(self, work: GraphWork | None) -> None:
        with self._lock:
            if work is None:
                self._missing.add(_REPLAY)
                return
            thread = threading.get_ident()
            now: tuple[str, ...] = ()
            for key, buffer in work.buffers.items():
                self._buffers.setdefault(key, buffer)
            for part in (*work.parts, GraphPart(0, ())):
                same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(now, part.ranges, strict=False)))
                for _ in now[same:]:
                    self._closes(thread)
                for name in part.ranges[same:]:
                    self._opens(name, thread)
                for one in part.operators:
                    self._did(one, thread)
                now = part.ranges

    def _launch(self, thread: int, place: LaunchPlace, around: Instance) -> None:
        self._has_seen_launch = True
        stack, launches = self._open.setdefault(thread, []), self._launches.setdefault(thread, [])
        # A launch within another says nothing: the outer one is what the program called.
        innermost = around if launches else self._compiled.enter(thread, place, around)
        stack.append(innermost)
        launch = _Launch(loaded.get(place.graph, {}).get(place.line))
        launches.append((len(stack), launch))
        record = launch.record
        # What is captured into a CUDA graph runs when that is replayed.
        if len(launches) == 1 and record is not None and record.flops and not _is_capturing():
            products = Products(record.flops, record.dtype, record.masked_flops, record.recomputed_flops)
            self._add(innermost, products)

    def _launched(self, launch: _Launch) -> None:
        if launch.record is None or not launch.record.is_extern:
            self._missing.add(FUSED)
        if not launch.is_known and not launch.has_products:
            self._missing.add(_COMPILED)

    def _add(self, innermost: Instance, products: Products, other_flops: int = 0) -> None:
        self._account.add(innermost, products, other_flops)
        if OPTIMIZER not in innermost.path:
            self._model_flops += products.flops - products.recomputed_flops

    def ended(self, _begun: None, func: Any, args: Sequence[Any], kwargs: dict[str, Any], returned: Any) -> None:
        if self.failure is not None or self._looks_at_masks or _is_capturing():  # what is captured does not run now
            return
        try:
            if has_other_gradient(func, args):
                self._differs = base_name(func)
            with self._lock:
                work = describe_call(func, args, kwargs, returned, self._buffers)
                if work is not None:
                    self._did(work, threading.get_ident())
                    self._note_line(work, _name_by_shape(work.name, args), sys._getframe(1))
                    if work.name == "convolution":
                        self._separate.convolves(self._innermost(), tuple(args[0].shape[2:]))
                    if work.name in _DENSE_GRADIENTS:
                        self._note_table(returned, name_arguments(func, args, kwargs)["indices"])
                    if work.products.flops and isinstance(returned, torch.Tensor):
                        self._scoring[returned.shape[-1]] = self._module()
                    if work.name == _LOSS_OF_CLASSES:
                        self._note_targets(name_arguments(func, args, kwargs))
                    if work.name == "embedding" and FORWARD in self._innermost().path:
                        self._note_tokens(*args[:2])
                    if _FUSED_ATTENTION.fullmatch(work.name):
                        self._note_mask(name_arguments(func, args, kwargs))
        except Exception as error:  # the program goes on
            self.failure = f"counting {base_name(func)} failed ({describe_error(error)})"

    def _innermost(self) -> Instance:
        stack = self._open.get(threading.get_ident()) or self._open.get(self._main)
        return stack[-1] if stack else self._account.step

    def _did(self, work: OperatorWork, thread: int) -> None:
        innermost, launches = self._innermost(), self._launches.get(thread)
        if work.missing is not None:
            self._missing.add(work.missing)
        if launches:
            launches[0][1].has_products |= work.products.flops > 0
            if launches[0][1].is_known:  # what it is known to do counts already
                work = replace(work, products=Products())
        self._add(innermost, work.products, work.other_flops)
        self._account.move(innermost, work.reads, work.writes)
        for follower in (self._separate, self._repeated, self._computed, self._needed, self._apart):
            follower.did(innermost, work)

    def _note_line(self, work: OperatorWork, name: str, frame: FrameType) -> None:
        """Count an operator for the line of the user's own that calls it, unless backward or the optimizer does."""
        path = tuple(map(kind_of, self._innermost().path))
        place = None if {BACKWARD, OPTIMIZER}.intersection(path) else find_place(frame)
        if place is None or threading.get_ident() != self._main:
            return
        self._turns.did(self._innermost(), work, place)
        sums = self._lines.setdefault((path, name, work.dtype, place), Counter())
        sums["count"] += 1
        sums["flops"] += work.products.flops
        sums["bytes"] += sum(access.bytes for access in (*work.reads, *work.writes))

    def _note_table(self, gradient: torch.Tensor, indices: torch.Tensor) -> None:
        shape = tuple(gradient.shape)
        sums = self._tables.setdefault((self._module(), shape), Counter())
        sums["rows"] += shape[0]
        sums["used"] += min(shape[0], indices.numel())
        sums["bytes"] += gradient.numel() * gradient.element_size()

    def _module(self) -> str:
        path = self._innermost().path
        return kind_of(path[-1]) if path else ""

    def _note_targets(self, given: dict[str, Any]) -> None:
        """Which module scored the positions says the number of classes: it was the last with so many columns."""
        scores, targets = given["self"], given["target"]
        module = self._scoring.get(scores.shape[-1])
        if module and scores.dim() == targets.dim() + 1 == _OF_POSITIONS:
            self._look_at_masks(lambda masks: masks.add_targets(module, targets, given.get("ignore_index", _IGNORED)))

    def _note_tokens(self, table: torch.Tensor, tokens: torch.Tensor) -> None:
        if tokens.dim() == _OF_TOKENS and len(tokens) > 1:
            self._look_at_masks(lambda masks: masks.add_tokens(tokens, len(table)))

    def _note_mask(self, given: dict[str, Any]) -> None:
        mask = given.get("attn_bias", given.get("attn_mask"))
        if isinstance(mask, torch.Tensor):
            module = self._module()
            self._look_at_masks(lambda masks: masks.add_attention(module, mask))


def _as_numbers(value: Any) -> Any:
    return value.reshape(-1).tolist() if isinstance(value, torch.Tensor) else value


def _name_by_shape(operator: str, args: Sequence[Any]) -> str:
    """Return an operator's name, where shapes tell a signal's or a volume's convolution, or a norm of each image.

    torch's instance norm is its batch norm of one sample that has all samples' channels.
    """
    if operator == "convolution":
        return _CONVOLUTIONS.get(args[0].dim(), operator)
    return INSTANCE_NORM if operator in _BATCH_NORMS and args[0].shape[0] == 1 else operator


def _describe_lines(lines: dict[_OperatorPlace, Counter[str]]) -> Iterator[OperatorLine]:
    for (path, operator, dtype, place), sums in lines.items():
        line = describe(place)
        if line.file is not None:
            where = line.file, line.line, line.function
            yield OperatorLine(path, operator, dtype, *where, sums["count"], sums["flops"], sums["bytes"])


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
