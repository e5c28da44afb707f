"""The variables of running functions are read, and none of them stays alive for it."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import pytest

from profkit.capture.steps.variable_names import variable_of, variables_at_hand


class Thing:
    """Something that a weak reference can follow."""


MODULES = Thing()


def test_nothing_stays_alive_for_having_been_read() -> None:
    thing = Thing()
    alive = weakref.ref(thing)
    for value in variables_at_hand():
        del value
    del thing
    assert alive() is None


@pytest.mark.skipif(sys.version_info < (3, 12), reason="no way to read a function's variables that makes no copy")
def test_variables_of_the_caller_and_its_callers_are_found() -> None:
    thing, captured = Thing(), Thing()

    def inner() -> list[object]:
        own = captured
        found = [one for one in variables_at_hand() if one is own or one is thing]
        return list({id(one): one for one in found}.values())

    assert inner() == [captured, thing]


def test_variables_of_a_module_are_found() -> None:
    code = compile("found = any(one is thing for one in variables_at_hand())", "module", "exec")
    namespace = {"thing": MODULES, "variables_at_hand": variables_at_hand}
    exec(code, namespace)
    assert namespace["found"] is True


def test_a_variable_of_a_running_function_is_found_by_its_name() -> None:
    def running(number: int) -> tuple[Any, Any]:
        frame = sys._getframe()
        return variable_of(frame, "number"), variable_of(frame, "missing")

    assert running(54321) == (54321, None)
