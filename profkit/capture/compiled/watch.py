"""Follows code that torch.compile generates, from the program's operators to the launches in a trace.

While Inductor generates code, `origins` records what each launch computes. When the code is loaded, freshly made or
from a cache, that is written to the run's ``compiled.jsonl``, and each launch gets a range while the hooks record.
Nothing here changes what is compiled, what is cached under which key, or what runs.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import nn

from profkit.annotation import Range
from profkit.capture.compiled.generated_file import GeneratedFile, LaunchSite, describe_memory, read_generated_file
from profkit.capture.compiled.origins import CodeGeneration, Known, Origin, Record, Sidecars, line_of
from profkit.capture.compiled.places import Entries, LoadedGraph, TracedGraph, TracedGraphs, places_in
from profkit.capture.compiled.stand_ins import stand_in, stand_in_for_methods
from profkit.capture.hooks import Call
from profkit.capture.hooks.hooks import Hooks
from profkit.capture.hooks.open_ranges import OpenRanges
from profkit.capture.patches import Function, outside_dynamo, patch
from profkit.capture.work import Products
from profkit.names import OPTIMIZER, launch_range
from profkit.run.compiled_code import CompiledGraph, Launch, append_records


class CompiledCode:
    """Follows this process's compiled code from `install` on.

    Args:
        hooks: they know the modules' names, what is open on each thread, and whether anything records.
        records: the file of the run to append to; None: nothing is written.
    """

    def __init__(self, hooks: Hooks, records: Path | None) -> None:
        self._hooks = hooks
        self._records = records
        self._generation = CodeGeneration(self._failed)
        self._traced = TracedGraphs(self._failed)
        self._sidecars = Sidecars()
        self._written: set[str] = set()
        self._error: str | None = None
        self._graphs = self._unknown = self._in_cpp = 0
        self._stop_waiting: Callable[[], None] = lambda: None

    def install(self) -> None:
        """Watch Inductor and Dynamo as soon as they are imported; nothing is imported here."""
        self._stop_waiting = when_imported(
            {
                "torch._inductor.debug": self._generation.watch_debug,
                "torch._inductor.scheduler": self._generation.watch_scheduler,
                "torch._inductor.codegen.triton": self._generation.watch_triton,
                "torch._inductor.codegen.wrapper": self._generation.watch_wrapper,
                "torch._inductor.codecache": self._watch_code_cache,
                "torch._dynamo.output_graph": self._traced.watch_output_graph,
            }
        )

    def remove(self) -> None:
        """Wait for no further import; what is watched already `patches.restore_all` puts back."""
        self._stop_waiting()

    @property
    def failure(self) -> str | None:
        """Why compiled code, or some of it, has no modules; None if all has, or there is none."""
        if self._error is not None:
            return f"profkit failed to follow compiled code ({self._error})"
        if self._in_cpp:
            return "code compiled with cpp_wrapper launches from C++, where it has no ranges"
        if self._graphs and not self._generation.is_possible:
            return f"torch {torch.__version__} does not say what a fused kernel comes from; torch 2.10 and later do"
        if not self._unknown:
            return None
        return (
            f"{self._unknown} of {self._graphs} compiled graphs came from Inductor's cache, which was filled without "
            "profkit; to compile them anew, set TORCHINDUCTOR_CACHE_DIR to a new folder"
        )

    def _watch_code_cache(self, _: Any) -> None:
        def wrap(plain: Function) -> Function:
            def watched(cls: Any, key: str, path: str, linemap: Any = None, attrs: Any = None, **more: Any) -> Any:
                module = plain(cls, key, path, linemap, attrs, **more)
                if attrs is not None and hasattr(module, "call"):  # the code of a graph, not that of one kernel
                    try:
                        outside_dynamo(self._loaded, module, Path(path), linemap or ())
                    except Exception as error:
                        self._failed(error)
                return module

            return watched

        patch("torch._inductor.codecache.PyCodeCache.load_by_key_path", wrap, stays=True)

    def _loaded(self, module: ModuleType, path: Path, linemap: Sequence[tuple[int, str | None]]) -> None:
        traced = self._traced.current()
        operators = () if traced is None else traced.operators
        taken, text = self._generation.take(), path.read_text()
        if taken is None:
            known = self._sidecars.find(path, operators)
        else:
            known = Known(*taken, operators)
            self._sidecars.keep(path, known)
        file = read_generated_file(text)
        self._graphs += 1
        self._unknown += known is None and bool(file.sites)
        self._in_cpp += "CppWrapperCodeCache" in text
        matched = match(file.sites, () if known is None else known.records)
        graph = _describe(path, traced, known, matched, linemap)
        graph = self._describe_memory(graph, file, traced, matched)
        if self._records is not None and graph.id not in self._written:
            self._written.add(graph.id)
            append_records(self._records, [graph])
        loaded[graph.id] = {launch.line: launch for launch in graph.launches}
        place = LoadedGraph(graph.id, traced, {site.line: _owners_of(record) for site, record in matched})
        entries = Entries(traced, self._hooks, self._failed, is_backward=graph.is_backward)
        around = _Ranges(place, entries, self._hooks, self._failed).around
        vars(module)["call"] = entries.watched(vars(module)["call"])
        stand_in(module, file, self._hooks, around)
        if any(not site.called for site in file.sites):
            stand_in_for_methods(module, text, self._hooks, around)

    def _describe_memory(
        self,
        graph: CompiledGraph,
        file: GeneratedFile,
        traced: TracedGraph | None,
        matched: list[tuple[LaunchSite, Record | None]],
    ) -> CompiledGraph:
        buffers = (buffer for _, record in matched if record is not None for buffer in record.buffers.items())
        try:
            owners = {
                name: (_name(origin, traced), origin.line or None)
                for name, origin in buffers
                if origin.modules or origin.line
            }
            return describe_memory(graph, file, owners)
        except Exception as error:
            self._failed(error)
            return graph

    def _failed(self, error: Exception) -> None:
        self._error = self._error or f"{type(error).__name__}: {error}"


loaded: dict[str, dict[int, Launch]] = {}
"""The launches of the graphs that this process has loaded, by the graph's id and the line."""


class _Ranges:
    def __init__(
        self,
        graph: LoadedGraph,
        entries: Entries,
        hooks: Hooks,
        failed: Callable[[Exception], None],
    ) -> None:
        self._graph = graph
        self._entries = entries
        self._hooks = hooks
        self._failed = failed
        self._last: tuple[Call | None, ref[nn.Module] | None, _Sites] = None, None, _Sites({})
        self._known: dict[Any, _Sites] = {}

    def around(
        self, function: Callable[..., Any], frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        opened = self._hooks.on_thread.ranges
        call = opened.call or opened.backward_call
        given = self._entries.module
        last, module, sites = self._last
        if call is None or last is not call or module is not given:
            sites = outside_dynamo(self._sites_in, opened, call, given)
            self._last = call, given, sites
        site = id(frame.f_code), frame.f_lasti
        range_ = sites[site] if site in sites else sites.find(site, frame)
        if range_ is None:
            return function(*args, **kwargs)
        token = opened.begin_range(range_.name, range_)
        try:
            return function(*args, **kwargs)
        finally:
            opened.end_range(token)

    def _sites_in(self, opened: OpenRanges, call: Call | None, given: ref[nn.Module] | None) -> _Sites:
        module = None if given is None else given()
        key: list[object] = [call is None and opened.has_range(OPTIMIZER), id(module)]
        while call is not None:
            key += [call.name, None if call.module is None else id(call.module())]
            call = call.around
        sites = self._known.get(tuple(key))
        if sites is None:
            ranges: dict[int, Range] = {}
            try:
                places = places_in(self._graph, opened, self._hooks, module)
                ranges = {line: Range(launch_range(place), None) for line, place in places.items()}
            except Exception as error:
                self._failed(error)
            sites = self._known[tuple(key)] = _Sites(ranges)
        return sites


class _Sites(dict[tuple[int, int], Range | None]):
    """The ranges of launches by the instruction that makes each, of a code object and an offset in it."""

    def __init__(self, range_of_line: dict[int, Range]) -> None:
        super().__init__()
        self._range_of_line = range_of_line

    def find(self, site: tuple[int, int], frame: FrameType) -> Range | None:
        self[site] = self._range_of_line.get(frame.f_lineno)
        return self[site]


def match(sites: Iterable[LaunchSite], records: Iterable[Record]) -> list[tuple[LaunchSite, Record | None]]:
    """Return each launch of a file with what was recorded of it: the n-th of a kernel's name is its n-th record.

    Where a name stands in the file more or less often than it was recorded, nothing is said of its launches.
    """
    sites = list(sites)
    recorded: dict[str, list[Record]] = defaultdict(list)
    for launched in records:
        recorded[_plain(launched.kernel)].append(launched)
    times = Counter(_plain(site.kernel) for site in sites if not site.result)
    in_order = {name: iter(in_turn) for name, in_turn in recorded.items() if len(in_turn) == times[name]}
    matched: list[tuple[LaunchSite, Record | None]] = []
    writers: dict[str, Record | None] = {}
    for site in sites:
        record = writers.get(site.workspace) if site.result else next(in_order.get(_plain(site.kernel), iter(())), None)
        if site.result and record is not None:
            owner = record.buffers.get(site.result)
            origins = record.origins if owner is None else (owner,)
            record = Record(site.kernel, is_extern=True, origins=origins, work=Products())
        elif site.workspace:
            writers[site.workspace] = record
        matched.append((site, record))
    return matched


def _plain(kernel: str) -> str:
    return kernel.removeprefix("torch.ops.").removesuffix(".default")


def _describe(
    path: Path,
    traced: TracedGraph | None,
    known: Known | None,
    matched: list[tuple[LaunchSite, Record | None]],
    linemap: Sequence[tuple[int, str | None]],
) -> CompiledGraph:
    graph = CompiledGraph(
        id="",
        code=path.stem,
        torch=torch.__version__,
        name="" if traced is None else traced.name,
        is_backward=known is not None and known.is_backward,
        launches=tuple(_launch(site, record, traced, linemap) for site, record in matched),
    )
    return replace(graph, id=sha256(json.dumps(asdict(graph)).encode()).hexdigest()[:10])


def _launch(
    site: LaunchSite, record: Record | None, traced: TracedGraph | None, linemap: Sequence[tuple[int, str | None]]
) -> Launch:
    if record is None:
        # Inductor keeps where each part of its code comes from: lines, no modules.
        stacks = [stack for start, stack in linemap if start <= site.line]
        line = line_of(stacks[-1]) if stacks else ""
        return Launch(site.line, site.kernel, site.is_extern, lines=(line,) if line else ())
    origins, work = record.origins, record.work
    return Launch(
        line=site.line,
        kernel=site.kernel,
        is_extern=site.is_extern,
        modules=tuple(dict.fromkeys(_name(origin, traced) for origin in origins if origin.modules or origin.line)),
        lines=tuple(dict.fromkeys(origin.line for origin in origins if origin.line)),
        operators=tuple(dict.fromkeys(origin.operator for origin in origins)),
        **({} if work is None else asdict(work)),
    )


def _owners_of(record: Record | None) -> tuple[tuple[str, ...], ...]:
    origins = () if record is None else record.origins
    return tuple(dict.fromkeys(origin.modules for origin in origins if origin.modules or origin.line))


def _name(origin: Origin, traced: TracedGraph | None) -> str:
    innermost = next(iter(reversed(origin.modules)), "")
    module = None if traced is None else traced.modules.get(innermost)
    return innermost if module is None else module.name


def when_imported(watchers: dict[str, Callable[[Any], None]]) -> Callable[[], None]:
    """Call each watcher with its module: now if it is imported, else right after its import.

    Returns:
        What ends the wait for those that are not imported yet.
    """
    for name, watch in watchers.items():
        if name in sys.modules:
            watch(sys.modules[name])
    missing = {name: watch for name, watch in watchers.items() if name not in sys.modules}
    importer = _Importer(missing)
    if missing:
        sys.meta_path.insert(0, importer)
    return importer.leave


class _Importer:
    """A finder that finds what the others find, and shows certain modules once they have been imported."""

    def __init__(self, watchers: dict[str, Callable[[Any], None]]) -> None:
        self._watchers = watchers

    def leave(self) -> None:
        self._watchers.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._watchers:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(
            (found_spec for finder in others if (found_spec := finder.find_spec(name, path, target)) is not None), None
        )
        if spec is not None and spec.loader is not None:
            self._show_after(spec.loader, name)
        return spec

    def _show_after(self, loader: Any, name: str) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            watch = self._watchers.pop(name, None)
            if watch is not None:
                watch(module)
            if not self._watchers:
                self.leave()

        loader.exec_module = exec_module
