"""Which operators autocast runs in which dtype, found by calling each with inputs of either and seeing what runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes.precision.inputs import FLOAT32, KEEPS, LOWER, MIXED

# Each takes a square matrix, or two of them.
_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: functional.linear(x, x),
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "softmax": lambda x: functional.softmax(x, dim=-1),
    "log_softmax": lambda x: functional.log_softmax(x, dim=-1),
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "exp": torch.exp,
    "log": torch.log,
    "rsqrt": torch.rsqrt,
    "pow": lambda x: torch.pow(x, 2),
    "square": torch.square,
    "sum": torch.sum,
    "mean": torch.mean,
    "cumsum": lambda x: torch.cumsum(x, dim=-1),
    "norm": torch.linalg.vector_norm,
    "cross_entropy": lambda x: functional.cross_entropy(x, torch.zeros(len(x), dtype=torch.long, device=x.device)),
    "dropout": lambda x: functional.dropout(x, 0.1),
}
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": torch.matmul,
    "einsum": lambda x, y: torch.einsum("ij,jk->ik", x, y),
    # Fused attention wants four dimensions.
    "scaled_dot_product_attention": lambda x, y: _attention(x[None, None], y[None, None]),
    "add": torch.add,
    "mul": torch.mul,
    "cat": lambda x, y: torch.cat([x, y]),
    "mse_loss": functional.mse_loss,
}
_MOVES = frozenset({"_to_copy", "clone", "_unsafe_view"})
"""They compute nothing, as views do not."""


def classify_operators(device: str, dtype: torch.dtype) -> list[dict[str, object]]:
    """Return a row an operator, as `classify` does, for what autocast to ``dtype`` makes of it."""
    calls = [(name, unary, 1) for name, unary in _UNARY.items()] + [(name, each, 2) for name, each in _BINARY.items()]
    return [{"operator": name, **classify(function, count, device, dtype)} for name, function, count in calls]


def classify(function: Callable[..., Tensor], inputs: int, device: str, dtype: torch.dtype) -> dict[str, object]:
    """Return what autocast runs of a function of some square matrices: in float32, in ``dtype``, in its input's dtype.

    ``runs_in`` is told from the operators that computed something, each by the dtype of its first result: `MIXED` is
    where they differ. ``ran_float32`` and ``ran_low`` name them for inputs in float32 and in ``dtype``; ``float32``,
    ``low`` and ``mixed`` are the dtype of the output for such inputs and for one of each, None where that is refused or
    there is but one.
    """
    wide = torch.randn(16, 16, device=device)
    narrow = wide.to(dtype)
    low = str(dtype).removeprefix("torch.")
    with torch.autocast(device, dtype=dtype):
        (of_wide, ran_wide), (of_narrow, ran_narrow) = (_run(function, *[x] * inputs) for x in (wide, narrow))
        of_both = _run(function, narrow, wide)[0] if inputs > 1 else None
    classes = {(low, low): LOWER, ("float32", "float32"): FLOAT32, ("float32", low): KEEPS}
    dtypes = ["/".join(dict.fromkeys(each for _, each in ran)) for ran in (ran_wide, ran_narrow)]
    return {
        **{"runs_in": classes.get((dtypes[0], dtypes[1]), MIXED), "float32": of_wide, "low": of_narrow},
        **{"mixed": of_both, "ran_float32": ran_wide, "ran_low": ran_narrow},
    }


class _Computed(TorchDispatchMode):
    """Writes down each operator below autocast that computes floating-point numbers, once a dtype of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket).removeprefix("aten.")
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if made and not func.is_view and name not in _MOVES:
            entry = (name, str(made[0].dtype).removeprefix("torch."))
            if entry not in self.ran:
                self.ran.append(entry)
        return result


def _attention(query: Tensor, key: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, key)


def _run(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[str | None, list[tuple[str, str]]]:
    """Return the dtype of the output, and what ran with the dtype of its result."""
    computed = _Computed()
    try:
        with computed:
            return str(function(*inputs).dtype).removeprefix("torch."), computed.ran
    except RuntimeError:
        # What it refuses, such as two dtypes at once, is the answer.
        return None, computed.ran
