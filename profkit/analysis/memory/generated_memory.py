"""Who holds the memory of compiled code: the module and the line whose result lies in an allocation at a moment.

Inductor's generated code allocates on known lines (`profkit.run.compiled_code.Allocation`), and hands memory on from
buffer to buffer without asking the allocator. Who holds an allocation at a moment follows from where the call of the
generated code stood then: at the line of its last event, an alloc or a free, when the moment comes right after it;
at its end when something else allocated since. Between two events of the call several buffers may hold the memory; all
of these are named.

A call is a run of allocations, one after the other, whose lines stand in the order in which the code runs. A first
line that comes again begins the next call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from profkit.allocator.replay import Replay
from profkit.analysis.memory.stacks import StackBook
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


@dataclass
class _Call:
    """One run of generated code: its allocations, and whether another's came after them."""

    rows: list[int] = field(default_factory=list)
    next_row: int | None = None


class _Code:
    """One generated file, by its lines. Graphs that share it differ in their modules alone."""

    def __init__(self, graphs: list[CompiledGraph]) -> None:
        self.graphs = graphs
        self.launches = [{launch.line: launch for launch in graph.launches} for graph in graphs]
        self._by_line: list[dict[int, list[Allocation]]] = []
        for graph in graphs:
            by_line: dict[int, list[Allocation]] = {}
            for one in graph.allocations:
                by_line.setdefault(one.line, []).append(one)
            self._by_line.append(by_line)
        self._spans = [(span[0], span[-1]) for span in graphs[0].spans if span]

    def position(self, line: int) -> int:
        """Return when a line runs: numbers in the order of running."""
        place = next((at for at, (first, last) in enumerate(self._spans) if first <= line <= last), 0)
        return place * _LINES + line

    def allocations(self, line: int) -> Iterator[tuple[int, Allocation]]:
        """Yield what a line allocates, with the number of the graph that says so.

        What a launch asks for besides (a library's workspace) is its own.
        """
        for number, by_line in enumerate(self._by_line):
            if line in by_line:
                yield from ((number, one) for one in by_line[line])
            elif line in self.launches[number]:
                yield number, Allocation(line, (Holder(line, line),))

    def launches_at(self, line: int) -> bool:
        return any(line in launches for launches in self.launches)

    def owners(self, number: int, holder: Holder) -> tuple[tuple[str, ...], str | None]:
        """Return the modules and the line of a holder, or else of the launch that writes it."""
        launch = self.launches[number].get(holder.launch) if holder.launch is not None else None
        modules = launch.modules if launch is not None and holder.module is None else ()
        lines = launch.lines if launch is not None else ()
        source = holder.source or (lines[0] if len(lines) == 1 else None)
        return (modules if holder.module is None else (holder.module,)), source


class GeneratedMemory:
    """Finds who holds the memory that one device's compiled code allocated."""

    def __init__(self, graphs: Iterable[CompiledGraph], replay: Replay, stacks: StackBook, ends_failing: bool) -> None:
        """Prepare to answer.

        Args:
            graphs: what the run knows of its compiled code.
            replay: the device's allocations.
            stacks: theirs.
            ends_failing: whether the last event is an allocation that failed: then a call may still be running.
        """
        by_code: dict[str, list[CompiledGraph]] = {}
        for graph in graphs:
            by_code.setdefault(graph.code, []).append(graph)
        self._codes = {code: _Code(some) for code, some in by_code.items()}
        self._replay, self._stacks = replay, stacks
        self._ends_failing = ends_failing
        self._calls: dict[int, _Call] = {}

    def held(self, row: int, moment: int | None = None) -> Held | None:
        """Return who holds an allocation at a moment on the curves, by default as it is made.

        None if no compiled code that the run knows made it.
        """
        site = self._site(row)
        if site is None:
            return None
        code, line = site
        found = list(code.allocations(line))
        if not found:
            return None
        first, last = (code.position(line),) * 2 if moment is None else self._window(code, row, moment)
        modules: dict[tuple[str, ...], None] = {}
        sources: dict[str | None, None] = {}
        is_first = True
        for number, one in found:
            for place, holder in _holders_within(code, one, first, last):
                owners, source = code.owners(number, holder)
                modules[owners] = None
                sources[source] = None
                is_first &= place == 0
        return Held(
            modules=tuple(dict.fromkeys(name for some in modules for name in some)),
            source=next(iter(sources)) if len(sources) == 1 else None,
            is_decided=len(modules) == 1,
            is_first=is_first,
            is_freed_in_call=all(one.freed is not None for _, one in found),
        )

    def same_call(self, row: int) -> list[int]:
        """Return the allocations of the call of generated code that made this one."""
        site = self._site(row)
        return [] if site is None else self._call(site[0], row).rows

    def _site(self, row: int) -> tuple[_Code, int] | None:
        """Return the generated code that made an allocation, and the line."""
        if not self._codes:
            return None
        for name, line in self._stacks.of(row).generated:
            if name in self._codes:
                return self._codes[name], line
        return None

    def _window(self, code: _Code, row: int, moment: int) -> tuple[int, int]:
        """Return the first and the last place at which the call that made an allocation may stand at a moment."""
        replay, call = self._replay, self._call(code, row)
        before, latest, after = 0, -1, _END
        for event, place in self._events(code, call):
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
        """Yield the events of a call that the generated file has a line for: (event, place)."""
        for row in call.rows:
            site = self._site(row)
            assert site is not None
            yield int(self._replay.birth[row]), code.position(site[1])
            lines = {one.freed for _, one in code.allocations(site[1])}
            freed = lines.pop() if len(lines) == 1 else None
            if freed is not None:
                yield int(self._replay.freed[row]), code.position(freed)
                yield int(self._replay.completed[row]), code.position(freed)

    def _call(self, code: _Code, row: int) -> _Call:
        """Return the call that made an allocation: those before and after it that its lines allow."""
        if row not in self._calls:
            first = row
            while self._follows(code, first - 1, first):
                first -= 1
            call = _Call([first])
            while self._follows(code, call.rows[-1], call.rows[-1] + 1):
                call.rows.append(call.rows[-1] + 1)
            call.next_row = call.rows[-1] + 1 if call.rows[-1] + 1 < len(self._replay) else None
            self._calls.update(dict.fromkeys(call.rows, call))
        return self._calls[row]

    def _follows(self, code: _Code, row: int, later: int) -> bool:
        """Return whether an allocation and the one after it belong to one call of generated code."""
        if row < self._replay.start_count or later >= len(self._replay):
            return False
        sites = self._site(row), self._site(later)
        if any(site is None or site[0] is not code for site in sites):
            return False
        (_, line), (_, next_line) = (site for site in sites if site is not None)
        before, after = code.position(line), code.position(next_line)
        return before < after or (before == after and code.launches_at(line))


def _holders_within(code: _Code, one: Allocation, first: int, last: int) -> Iterator[tuple[int, Holder]]:
    """Yield who holds an allocation while its call goes from one place to another, with their number in its life."""
    places = [code.position(holder.line) for holder in one.holders]
    for number, holder in enumerate(one.holders):
        ends = places[number + 1] if number + 1 < len(places) else _END + 1
        if (places[number] <= last or number == 0) and ends > first:
            yield number, holder
