"""What the shell offers after ``--range``: the names of the ranges in the capture that the command line names."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import click

from profkit.errors import ProfkitError
from profkit.names import kind_of

_SPECIAL_IN_BASH = re.compile(r"([^\w./:@%+=-])")


def complete_ranges(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the names, and kinds such as ``layer *``, that begin with ``incomplete``, in the order of first opening.

    A capture that cannot be read offers nothing: what is wrong with it is said when the command runs.
    """
    # An option without its value, which is being typed, ends click's parsing: the arguments before it are left over.
    said = [*context.args, *(str(value) for value in context.params.values() if isinstance(value, Path))]
    capture = next((text for text in said if Path(text).exists()), None)
    if capture is None:
        return []
    from profkit.reading import open_trace

    try:
        trace = open_trace(Path(capture)).trace
    except (ProfkitError, OSError):
        return []
    names = [trace.names[name] for name in trace.ranges.name[trace.ranges.start_ns.argsort(kind="stable")].tolist()]
    members = Counter(kind_of(name) for name in dict.fromkeys(names))
    kinds = [kind for kind, count in members.items() if count > 1]  # as in the tree: a single conv2 is no conv*
    found = [name for name in dict.fromkeys([*kinds, *names]) if name.startswith(incomplete) and name.isprintable()]
    # Other shells escape what they insert.
    is_bash = os.environ.get("_PROFKIT_COMPLETE", "").startswith("bash")
    return [_SPECIAL_IN_BASH.sub(r"\\\1", name) for name in found] if is_bash else found
