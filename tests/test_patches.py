"""Replacing functions of torch: what a caller sees, and that nothing is left behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from profkit.capture import patches  # noqa: E402
from profkit.capture.patches import call_between, patch, restore  # noqa: E402


class Base:
    def inherited(self) -> str:
        return "base"


class Kind(Base):
    @staticmethod
    def static(value: int) -> int:
        return value

    @classmethod
    def of_class(cls, value: int) -> tuple[str, int]:
        return cls.__name__, value


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module: Any = ModuleType("somebodys.library")
    module.Kind = Kind
    module.add = lambda a, b=1: a + b
    monkeypatch.setitem(sys.modules, "somebodys.library", module)
    names = ("add", "missing", "Kind.static", "Kind.of_class", "Kind.inherited", "Nobody.method")
    for name in names:
        monkeypatch.setitem(patches.REASONS, f"somebodys.library.{name}", "a test")
    monkeypatch.setitem(patches.REASONS, "builtins.int.bit_length", "a test")
    yield module
    restore()


def test_a_replacement_calls_through_and_is_undone(library: Any) -> None:
    plain, calls = library.add, []
    assert patch("somebodys.library.add", call_between(lambda: calls.append("before"), lambda: calls.append("after")))
    assert library.add(1, b=4) == 5
    with pytest.raises(TypeError):
        library.add()
    assert calls == ["before", "after"] * 2
    assert library.add.__wrapped__ is plain
    restore()
    assert library.add is plain


def test_methods_stay_what_they_are(library: Any) -> None:
    before = dict(vars(Kind))
    for name in ("static", "of_class", "inherited"):
        assert patch(f"somebodys.library.Kind.{name}", call_between(None, None))
    assert (Kind.static(3), Kind.of_class(4), Kind().inherited()) == (3, ("Kind", 4), "base")
    restore("somebodys.library.Kind.inherited")
    assert "inherited" not in vars(Kind)
    restore()
    assert {name: vars(Kind)[name] for name in ("static", "of_class")} == {
        name: before[name] for name in ("static", "of_class")
    }


def test_what_is_not_there_or_written_in_c_is_left_alone(library: Any) -> None:
    assert not patch("somebodys.library.missing", call_between(None, None))
    assert not patch("somebodys.library.Nobody.method", call_between(None, None))
    assert not patch("builtins.int.bit_length", call_between(None, None))


def test_a_replacement_of_somebody_elses_stays(library: Any) -> None:
    patch("somebodys.library.add", call_between(None, None))
    ours = library.add
    library.add = lambda *args: ours(*args) * 10
    theirs = library.add
    restore()
    assert library.add is theirs
    assert library.add(1) == 20


def test_two_replacements_of_one_function_are_undone_in_reverse(library: Any) -> None:
    plain = library.add
    for _ in range(2):
        patch("somebodys.library.add", call_between(None, None))
    restore("somebodys.library.add")
    assert library.add is plain


def test_a_replacement_that_stays_is_not_undone_with_the_others(library: Any) -> None:
    plain = library.add
    patch("somebodys.library.add", call_between(None, None), stays=True)
    restore()
    assert library.add is not plain
    assert library.add(1, b=4) == 5


def test_each_function_that_is_named_is_there_in_this_torch_or_known_to_be_elsewhere() -> None:
    for module in (  # a name is looked up among what is imported
        "nvtx",
        "torch._dynamo.output_graph",
        "torch._inductor.codecache",
        "torch._inductor.codegen.cpp",
        "torch._inductor.codegen.triton",
        "torch._inductor.codegen.wrapper",
        "torch._inductor.debug",
        "torch._inductor.runtime.triton_heuristics",
        "torch._inductor.scheduler",
    ):
        import_module(module)
    elsewhere = {"torch._C._cuda_record_memory_history_legacy", "torch._C._accelerator_resetPeakStats"}
    elsewhere.add("warnings._filters_mutated_lock_held")  # Python 3.14
    gpu_alone = {name for name in patches.REASONS if name.startswith("torch._C._cuda_")}
    missing = set()
    for target in patches.REASONS:
        owner, name = patches._owner_of(target)
        if not hasattr(owner, name):
            missing.add(target)
    assert missing <= elsewhere | gpu_alone
