"""Where LayerNorm breaks if all of it is computed in one narrow dtype, shown with data: square, sum, epsilon."""

from __future__ import annotations

import torch
from torch import Tensor

from recipes.precision import EPSILON, FEATURES, MOST, ONE_BY_ONE, ROWS, SCALES


def find_limits(device: str, dtype: torch.dtype) -> dict[str, object]:
    """Return what the steps of LayerNorm become in ``dtype``, and how far whole LayerNorms in it are from float64's.

    ``square_overflows_from``: the least whole number with an infinite square, up to 10,000. ``ones_add_up_to``: the sum
    of 10,000 ones, added one after the other. ``epsilon_1e-5`` and ``epsilon_1e-8``: the stored value. Errors are the
    greatest distance from the float64 result over its greatest value; None where the result is not finite.
    ``zero_outputs``: the share of results that are 0. ``squares_lost``: the share of squares that are 0 although the
    squared number is not.
    """
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64).to(device, _widest(device))
    limits: dict[str, object] = {
        "square_overflows_from": _first_overflow(device, dtype),
        "ones_add_up_to": _sum_one_by_one(torch.ones(MOST, 1, device=device, dtype=dtype)).item(),
        "epsilon_1e-5": torch.tensor(1e-5, dtype=dtype).double().item(),
        "epsilon_1e-8": torch.tensor(1e-8, dtype=dtype).double().item(),
        "constant_row_with_epsilon_1e-8": _is_finite(layer_norm(torch.ones(1, 8, device=device, dtype=dtype), 1e-8)),
    }
    for name, scale in SCALES.items():
        narrow = (data * scale).to(dtype)
        # Rounding of the input is not part of LayerNorm's error.
        exact = layer_norm(narrow.to(data.dtype), EPSILON)
        plain, one_by_one = (layer_norm(narrow, EPSILON, one_by_one=ours) for ours in (False, True))
        centred = narrow - _mean(narrow, one_by_one=False)
        limits |= {
            f"error_{name}": _error(plain, exact),
            f"error_{name}{ONE_BY_ONE}": _error(one_by_one, exact),
            f"zero_outputs_{name}": _share(plain == 0),
            f"squares_lost_{name}": _share((centred.square() == 0) & (centred != 0)),
        }
    return limits


def layer_norm(rows: Tensor, epsilon: float, *, one_by_one: bool = False) -> Tensor:
    """Return LayerNorm over the last dimension, each step rounded to the rows' dtype.

    torch's own reductions add in float32 and round once; ``one_by_one`` rounds after each addition, as a sum in the
    dtype itself would.
    """
    mean = _mean(rows, one_by_one)
    centred = rows - mean
    variance = _mean(centred.square(), one_by_one)
    return centred * torch.rsqrt(variance + epsilon)


def _mean(rows: Tensor, one_by_one: bool) -> Tensor:
    if one_by_one:
        return _sum_one_by_one(rows.T)[:, None] / rows.shape[-1]
    return rows.mean(dim=-1, keepdim=True)


def _sum_one_by_one(lines: Tensor) -> Tensor:
    total = torch.zeros_like(lines[0])
    for line in lines:
        total += line
    return total


def _first_overflow(device: str, dtype: torch.dtype) -> int | None:
    squares = torch.arange(1, MOST + 1, device=device).to(dtype).square()
    infinite = squares.isinf().nonzero()
    return int(infinite[0].item()) + 1 if len(infinite) else None


def _error(result: Tensor, exact: Tensor) -> float | None:
    if not _is_finite(result):
        return None
    return ((result.to(exact.dtype) - exact).abs().max() / exact.abs().max()).item()


def _share(which: Tensor) -> float:
    return which.sum().item() / which.numel()


def _is_finite(result: Tensor) -> bool:
    return bool(result.isfinite().all())


def _widest(device: str) -> torch.dtype:
    return torch.float32 if device == "mps" else torch.float64
