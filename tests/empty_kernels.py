"""Inductor without a C++ compiler: for tests of what it generates, whatever the kernels compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch._inductor.async_compile import AsyncCompile


def _does_nothing(*_: Any) -> None: ...


@contextmanager
def empty_kernels() -> Iterator[None]:
    """Have Inductor generate all its code, with C++ kernels that are not compiled and do nothing."""
    with patch.object(AsyncCompile, "cpp_pybinding", lambda *_: _does_nothing):
        yield
