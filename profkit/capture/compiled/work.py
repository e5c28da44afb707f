"""Where the work of compiled code counts: under the modules that a trace's reader will find around its launches.

The ranges that the program or profkit's hooks open exist; those of modules within compiled code do not. A launch's
range names them (`profkit.run.compiled_code`), and they become instances of the account here by the reader's rule
(`analysis.placing.compiled_ranges`): modules that are open around anyway are not repeated, and launches in a row with
the same beginning of their paths share one instance, until another range begins or ends on the thread.
"""

from __future__ import annotations

from profkit.capture.work.account import Instance, WorkAccount
from profkit.run.compiled_code import LaunchPlace


class CompiledInstances:
    """The instances of modules that stand for launches, on each thread."""

    def __init__(self, account: WorkAccount) -> None:
        self._account = account
        self._last: dict[int, tuple[Instance, list[tuple[str, Instance]]]] = {}

    def enter(self, thread: int, place: LaunchPlace, around: Instance) -> Instance:
        """Return the innermost instance for a launch within the instance ``around``."""
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
