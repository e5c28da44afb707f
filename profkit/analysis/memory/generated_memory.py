"""Who holds the memory of compiled code: the module and the line whose result lies in an allocation at a moment.

Inductor's generated code allocates on known lines (`profkit.run.compiled_code.Allocation`), and hands memory on from
buffer to buffer without asking the allocator. Where a call of it stood at a moment follows from its last alloc or free
before; between two of them several buffers may hold the memory, and all are named. A call is a run of allocations whose
lines stand in the order in which the code runs. The code of the backward pass may reuse what the forward pass saved:
which of its inputs that is follows from their order, in which both codes name the same parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from profkit.allocator.replay import History, Replay, replay_history
from profkit.analysis.memory import Owner, Phase, Timeline, find_timeline, match_owners, read_text
from profkit.analysis.memory.stacks import StackBook
from profkit.run.owners import Owners
from profkit.snapshot.columns import OOM, Device, Settings

if TYPE_CHECKING:
    from profkit.run.compiled_code import Allocation, CompiledGraph, Holder

_END = 2**62
_LINES = 2**31


@dataclass(frozen=True)
class Held:
    """Whose result lies in an allocation; names are relative to the module that was compiled.

    ``modules`` are one; none where Inductor needed the memory for no module; several where a fused kernel's result
    belongs to no single one, or where the holder is one of them and ``is_decided`` is false.
    """

    modules: tuple[str, ...]
    source: str | None
    is_decided: bool
    is_first: bool
    """Whether it is what the memory was allocated for."""
    is_freed_in_call: bool
    """Whether the generated code that allocated the memory frees it."""
    is_of_library: bool
    """Whether no line of the code asked for it, but a library that a line called, for itself."""


@dataclass(frozen=True)
class _Tenant:
    """One holder of an allocation: in which graph of which file, and whether another held it before."""

    code: _Code
    graph: int
    holder: Holder
    is_first: bool


@dataclass
class _Call:
    """One run of generated code: its allocations, and whether another's came after them."""

    rows: list[int] = field(default_factory=list)
    next_row: int | None = None
    events: list[tuple[int, int]] = field(default_factory=list)
    """The events that the generated file has a line for, and where in its order: (event, place)."""


class _Code:
    """One generated file, by its lines. Graphs that share it differ in their modules alone."""

    def __init__(self, graphs: list[CompiledGraph]) -> None:
        self.graphs = graphs
        self.launches = [{launch.line: launch for launch in graph.launches} for graph in graphs]
        self._by_line: list[dict[int, list[Allocation]]] = []
        for graph in graphs:
            by_line: dict[int, list[Allocation]] = {}
            for allocation in graph.allocations:
                if allocation.line is not None:
                    by_line.setdefault(allocation.line, []).append(allocation)
            self._by_line.append(by_line)
        self._spans = [(span[0], span[-1]) for span in graphs[0].spans if span]

    def position(self, line: int) -> int:
        place = next((at for at, (first, last) in enumerate(self._spans) if first <= line <= last), 0)
        return place * _LINES + line

    def allocations(self, line: int) -> Iterator[tuple[int, Allocation]]:
        """Yield each with the number of its graph; what a launch asks for besides (a workspace) is its own."""
        from profkit.run.compiled_code import Allocation, Holder

        for number, by_line in enumerate(self._by_line):
            if line in by_line:
                yield from ((number, allocation) for allocation in by_line[line])
            elif line in self.launches[number]:
                yield number, Allocation(line, (Holder(line, line),))

    def allocates(self, line: int) -> bool:
        return any(line in by_line for by_line in self._by_line)

    def owners(self, number: int, holder: Holder) -> tuple[tuple[str, ...], str | None]:
        launch = self.launches[number].get(holder.launch) if holder.launch is not None else None
        modules = launch.modules if launch is not None and holder.module is None else ()
        lines = launch.lines if launch is not None else ()
        source = holder.source or (lines[0] if len(lines) == 1 else None)
        return (modules if holder.module is None else (holder.module,)), source


class GeneratedMemory:
    """Finds who holds the memory that one device's compiled code allocated."""

    def __init__(self, graphs: Iterable[CompiledGraph], replay: Replay, stacks: StackBook, ends_failing: bool) -> None:
        """Prepare to answer; if it ``ends_failing``, in an allocation that failed, a call may still be running."""
        by_code: dict[str, list[CompiledGraph]] = {}
        for graph in graphs:
            by_code.setdefault(graph.code, []).append(graph)
        self._codes = {code: _Code(some) for code, some in by_code.items()}
        self._replay, self._stacks = replay, stacks
        self._ends_failing = ends_failing
        self._sites: dict[int, tuple[_Code, int] | None] = {}
        self._held: dict[tuple[int, int | None], Held | None] = {}
        self._calls: dict[int, _Call] = {}
        self._next_calls: dict[tuple[int, int], int | None] = {}
        self._taken: dict[tuple[int, int], dict[str, list[tuple[_Code, int, Allocation]]]] = {}

    def held(self, row: int, moment: int | None = None) -> Held | None:
        """Return who holds an allocation at a moment on the curves, by default as it is made.

        None if no compiled code that the run knows made it.
        """
        if (row, moment) not in self._held:
            self._held[row, moment] = self._find(row, moment)
        return self._held[row, moment]

    def _find(self, row: int, moment: int | None) -> Held | None:
        site = self._site(row)
        if site is None:
            return None
        code, line = site
        allocations = list(code.allocations(line))
        if not allocations:
            return None
        first, last = (code.position(line),) * 2 if moment is None else self._window(code, row, moment)
        tenants = [tenant for number, memory in allocations for tenant in _tenants(code, number, memory, first, last)]
        if first == _END and moment is not None:
            tenants = self._after_taking(code, row, moment, tenants)
        modules: dict[tuple[str, ...], None] = {}
        sources: dict[str | None, None] = {}
        for tenant in tenants:
            owners, source = tenant.code.owners(tenant.graph, tenant.holder)
            modules[owners] = None
            sources[source] = None
        return Held(
            modules=tuple(dict.fromkeys(name for some in modules for name in some)),
            source=next(iter(sources)) if len(sources) == 1 else None,
            is_decided=len(modules) == 1,
            is_first=all(tenant.is_first for tenant in tenants),
            is_freed_in_call=all(memory.freed is not None for _, memory in allocations),
            is_of_library=not code.allocates(line),
        )

    def _after_taking(self, code: _Code, row: int, moment: int, tenants: list[_Tenant]) -> list[_Tenant]:
        _, line = self._site(row) or (code, 0)
        allocations = list(code.allocations(line))
        takers = [
            taker for number, memory in allocations for taker in self._takers(code, number, memory.holders[-1].name)
        ]
        calls = [(began, taker) for taker in takers if (began := self._next_call(taker[0], row)) is not None]
        if not calls:
            return tenants
        began, (other, number, memory) = min(calls, key=lambda call: call[0])
        if int(self._replay.birth[began]) >= moment:
            return tenants
        now = list(_tenants(other, number, memory, *self._window(other, began, moment)))
        taken = [taker for taker in now if not taker.is_first]
        # Of several results of one call nobody knows which has this address.
        return taken if len(taken) == len(now) and len(allocations) == 1 else [*tenants, *taken]

    def _takers(self, code: _Code, number: int, name: str) -> list[tuple[_Code, int, Allocation]]:
        if (id(code), number) not in self._taken:
            by_output: dict[str, list[tuple[_Code, int, Allocation]]] = {}
            for other in self._codes.values():
                for which, graph in enumerate(other.graphs):
                    for output, memory in _reused_outputs(code.graphs[number], graph):
                        by_output.setdefault(output, []).append((other, which, memory))
            self._taken[id(code), number] = by_output
        return self._taken[id(code), number].get(name, [])

    def _next_call(self, code: _Code, row: int) -> int | None:
        call = self._calls[row]
        key = id(call), id(code)
        if key not in self._next_calls:
            module = self._module(row)
            later = range(call.rows[-1] + 1, len(self._replay))
            self._next_calls[key] = next(
                (
                    candidate
                    for candidate in later
                    if (self._site(candidate) or (None,))[0] is code and self._module(candidate) == module
                ),
                None,
            )
        return self._next_calls[key]

    def _module(self, row: int) -> str | None:
        text = read_text(self._stacks.raw_of(row))
        return None if text is None else text.module

    def same_call(self, row: int) -> list[int]:
        site = self._site(row)
        return [] if site is None else self._call(site[0], row).rows

    def _site(self, row: int) -> tuple[_Code, int] | None:
        if not self._codes:
            return None
        number = self._stacks.number_of(row)
        if number not in self._sites:
            known = (
                (self._codes[name], line) for name, line in self._stacks.facts[number].generated if name in self._codes
            )
            self._sites[number] = next(known, None)
        return self._sites[number]

    def _window(self, code: _Code, row: int, moment: int) -> tuple[int, int]:
        replay, call = self._replay, self._call(code, row)
        before, latest, after = 0, -1, _END
        for event, place in call.events:
            if event < moment:
                before, latest = max(before, place), max(latest, event)
            else:
                after = min(after, place)
        if latest == moment - 1:
            return before, before
        is_at_end = moment >= replay.event_count and not self._ends_failing
        if is_at_end or (call.next_row is not None and int(replay.birth[call.next_row]) < moment):
            return _END, _END
        return before, after

    def _events(self, code: _Code, call: _Call) -> Iterator[tuple[int, int]]:
        for row in call.rows:
            site = self._site(row)
            assert site is not None
            yield int(self._replay.birth[row]), code.position(site[1])
            lines = {allocation.freed for _, allocation in code.allocations(site[1])}
            freed = lines.pop() if len(lines) == 1 else None
            if freed is not None:
                yield int(self._replay.freed[row]), code.position(freed)
                yield int(self._replay.completed[row]), code.position(freed)

    def _call(self, code: _Code, row: int) -> _Call:
        if row not in self._calls:
            first = row
            while self._follows(code, first - 1, first):
                first -= 1
            call = _Call([first])
            while self._follows(code, call.rows[-1], call.rows[-1] + 1):
                call.rows.append(call.rows[-1] + 1)
            call.next_row = call.rows[-1] + 1 if call.rows[-1] + 1 < len(self._replay) else None
            call.events = list(self._events(code, call))
            self._calls.update(dict.fromkeys(call.rows, call))
        return self._calls[row]

    def _follows(self, code: _Code, row: int, later: int) -> bool:
        if row < self._replay.start_count or later >= len(self._replay):
            return False
        sites = self._site(row), self._site(later)
        if any(site is None or site[0] is not code for site in sites):
            return False
        (_, line), (_, next_line) = (site for site in sites if site is not None)
        before, after = code.position(line), code.position(next_line)
        return before < after or (before == after and any(line in launches for launches in code.launches))


def _tenants(code: _Code, graph: int, memory: Allocation, first: int, last: int) -> Iterator[_Tenant]:
    places = [code.position(holder.line) for holder in memory.holders]
    for number, holder in enumerate(memory.holders):
        ends = places[number + 1] if number + 1 < len(places) else _END + 1
        if (places[number] <= last or number == 0) and ends > first:
            yield _Tenant(code, graph, holder, number == 0)


def _reused_outputs(forward: CompiledGraph, backward: CompiledGraph) -> Iterator[tuple[str, Allocation]]:
    """Yield what a graph returns and its backward pass reuses: the name in the forward code, and what reuses it."""
    reused = [memory for memory in backward.allocations if memory.line is None]
    known = [(at, name) for at, name in enumerate(backward.inputs) if name in forward.inputs]
    if not reused or not known or not backward.is_backward or forward.name != backward.name:
        return
    first, name = known[0]
    for place in (at for at, output in enumerate(forward.outputs) if output == name):
        offset = place - first
        if all(forward.outputs[at + offset : at + offset + 1] == (name,) for at, name in known if at + offset >= 0):
            for memory in reused:
                at = backward.inputs.index(memory.holders[0].name) + offset
                if 0 <= at < len(forward.outputs):
                    yield forward.outputs[at], memory
            return


class ReplayedDevice:
    """One device's history, and what was recorded of it: stacks, owners, and who holds what compiled code allocated."""

    def __init__(
        self,
        device: Device,
        settings: Settings,
        recorded: Owners | None = None,
        named: Mapping[str, str] | None = None,
        *,
        compiled: Iterable[CompiledGraph] = (),
        is_only_device: bool = True,
    ) -> None:
        """Replay a device; ``named`` is phase name → glob on the names of annotations."""
        self.device = device
        self.is_only_device = is_only_device
        self._compiled = compiled
        self.recorded = recorded
        self.history: History = replay_history(device, settings)
        steps = [Phase(step.name, step.start_us, step.end_us) for step in recorded.steps] if recorded else []
        self.timeline: Timeline = find_timeline(device, named, steps)

    @cached_property
    def stacks(self) -> StackBook:
        return StackBook(self.device, self.history.replay)

    @cached_property
    def generated(self) -> GeneratedMemory:
        ends_failing = self.device.events.action[-1:].tolist() == [OOM]
        return GeneratedMemory(self._compiled, self.history.replay, self.stacks, ends_failing=ends_failing)

    @cached_property
    def matched_owners(self) -> tuple[dict[int, Owner], int]:
        """The recorded tensors of each allocation (a row) that the run knows, and how many owners match none."""
        if self.recorded is None:
            return {}, 0
        return match_owners(self.recorded, self.device.index, self.history.replay, self.timeline)

    @property
    def owners(self) -> dict[int, Owner]:
        """The recorded tensors of each allocation (a row of the replay) that the run knows."""
        return self.matched_owners[0]
