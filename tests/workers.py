"""What becomes of a run of the tests if a worker ends amid a test, as pytest's timeout makes it do if a test hangs.

The test has failed and its file goes on after it, and what the worker had started is ended with it.
"""

from __future__ import annotations

import os
from itertools import chain
from typing import Any

import pytest

from profkit.launch.family import Family

MARK = "PROFKIT_TESTS_WORKER"
"""The variable whose value marks all that one worker starts."""


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Name the worker for `pytest_configure` there."""
    node.workerinput[MARK] = f"{node.workerinput['testrunuid']}-{node.gateway.id}"


def pytest_configure(config: pytest.Config) -> None:
    """Mark what this process starts, if it is a worker."""
    if hasattr(config, "workerinput"):
        os.environ[MARK] = config.workerinput[MARK]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """End what a worker has left: an endless program would take a core from all tests that follow."""
    Family(node.workerinput[MARK], None, MARK).end()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Return what hands out whole files, each test once.

    After a worker has ended amid a test, pytest-xdist's own (3.8) hands out that test again, so that one that hangs
    does so in worker after worker. It also gives the next worker one file alone: if that has a single test left, it is
    never begun, as a worker begins a test when it knows what follows.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class EachTestOnce(LoadFileScheduling):
        def remove_node(self, node: Any) -> str | None:
            work = self.assigned_work[node]
            left = {file: [test for test, is_done in tests.items() if not is_done] for file, tests in work.items()}
            running = next(chain.from_iterable(left.values()), None)
            others = {
                file: dict.fromkeys((one for one in tests if one != running), False) for file, tests in left.items()
            }
            self.assigned_work[node] = {file: tests for file, tests in others.items() if tests}
            super().remove_node(node)
            return running

        def _reschedule(self, node: Any) -> None:
            super()._reschedule(node)
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

    return EachTestOnce(config, log)
