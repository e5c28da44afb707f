"""Whether torch.compile works on this thread: what runs then is no work of the program's."""

from __future__ import annotations

import torch
from torch._guards import CompileContext


def is_compiling() -> bool:
    """Return whether Dynamo traces here, or what it made is being compiled: that takes gradients of fake tensors."""
    return torch.compiler.is_compiling() or CompileContext.try_get() is not None
