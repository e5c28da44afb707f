"""The closure of an optimizer's step, watched."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from profkit.capture.closures import with_closure


@pytest.mark.parametrize("named", [False, True])
def test_each_call_of_the_closure_is_told_once_it_has_returned(named: bool) -> None:
    told: list[str] = []

    def closure() -> str:
        told.append("closure")
        return "loss"

    given: tuple[tuple[Any, ...], dict[str, Any]] = (
        (("optimizer",), {"closure": closure, "x": 1}) if named else (("optimizer", closure, 1), {})
    )
    args, kwargs, has_closure = with_closure(*given, lambda: told.append("returned"))
    watched = kwargs["closure"] if named else args[1]
    assert has_closure
    assert [watched(), watched()] == ["loss", "loss"]
    assert told == ["closure", "returned"] * 2
    assert (kwargs["x"] if named else args[2]) == 1
    assert args[0] == "optimizer"


@pytest.mark.parametrize("arguments", [(("optimizer",), {}), (("optimizer", None), {}), (("o",), {"closure": None})])
def test_without_one_nothing_changes(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    assert with_closure(*arguments, lambda: None) == (*arguments, False)
