"""Which operators autocast runs in which dtype, found by calling each with inputs of either."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

LOWER, FLOAT32, KEEPS = "lower precision", "float32", "its input's"

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
    "log": lambda x: torch.log(x.abs() + 1),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
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
    "scaled_dot_product_attention": lambda x, y: functional.scaled_dot_product_attention(x[None], y[None], y[None]),
    "add": torch.add,
    "mul": torch.mul,
    "cat": lambda x, y: torch.cat([x, y]),
    "mse_loss": functional.mse_loss,
}


def classify_operators(device: str, dtype: torch.dtype) -> list[dict[str, object]]:
    """Return a row an operator: the dtype of its output for inputs in float32, in ``dtype`` and one in each.

    It runs in lower precision if float32 comes out as ``dtype``, in float32 if ``dtype`` comes out as float32, else in
    its input's dtype. None stands for what the operator refuses.
    """
    wide = torch.randn(16, 16, device=device)
    narrow = wide.to(dtype)
    rows = []
    with torch.autocast(device, dtype=dtype):
        for name, unary in _UNARY.items():
            rows.append(_classify(name, dtype, _output(unary, wide), _output(unary, narrow), None))
        for name, binary in _BINARY.items():
            both = [_output(binary, *pair) for pair in ((wide, wide), (narrow, narrow), (narrow, wide))]
            rows.append(_classify(name, dtype, *both))
    return rows


def _classify(
    name: str, dtype: torch.dtype, of_wide: str | None, of_narrow: str | None, of_both: str | None
) -> dict[str, object]:
    low = str(dtype).removeprefix("torch.")
    runs_in = LOWER if of_wide == low else FLOAT32 if of_narrow == "float32" else KEEPS
    return {"operator": name, "runs_in": runs_in, "float32": of_wide, "low": of_narrow, "mixed": of_both}


def _output(operator: Callable[..., Tensor], *inputs: Tensor) -> str | None:
    try:
        return str(operator(*inputs).dtype).removeprefix("torch.")
    except RuntimeError:
        # What it refuses, such as two dtypes at once, is the answer.
        return None
