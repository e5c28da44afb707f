"""The dtypes that one training step of a toy model has under autocast, and the dtype in which each operator runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes.precision import EPSILON, FEATURES, FLOAT32, KEEPS, LOWER, MIXED, MOST, ONE_BY_ONE, ROWS, SCALES

BATCH, INPUTS, CLASSES = 32, 20, 5


class ToyModel(nn.Module):
    """``(batch, features)`` → logits ``(batch, classes)``: fc1, ReLU, LayerNorm over 10 features, fc2."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, 10, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, classes, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.fc2(self.ln(self.relu(self.fc1(inputs))))


class OperatorLog(TorchDispatchMode):
    """Records every operator below autocast, which has inserted its casts by then, with the dtypes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.seen: dict[tuple[str, str, str, str], int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        inputs = _dtypes((args, kwargs))
        if inputs:
            key = (self.phase, str(func.overloadpacket).removeprefix("aten."), inputs, _dtypes(result))
            self.seen[key] = self.seen.get(key, 0) + 1
        return result


def observe_step(device: str, dtype: torch.dtype) -> dict[str, object]:
    """Run forward, loss and backward of the toy model and return the dtype of each part and operator.

    Weights are float32. With ``dtype`` float32 there is no autocast.
    """
    model = ToyModel(INPUTS, CLASSES).to(device)
    inputs = torch.randn(BATCH, INPUTS, device=device)
    targets = torch.randint(CLASSES, (BATCH,), device=device)
    seen: dict[str, object] = {}

    def see(name: str, value: Tensor) -> None:
        seen[name] = short_name(value.dtype)

    def see_parameters(_module: nn.Module, _inputs: object) -> None:
        # Read within the autocast context, while the model runs.
        seen["parameters"] = ", ".join(sorted({short_name(each.dtype) for each in model.parameters()}))

    model.register_forward_pre_hook(see_parameters)
    for name, module in model.named_children():
        module.register_forward_hook(lambda _module, _inputs, output, name=name: see(f"{name}_output", output))
    log = OperatorLog()
    with log:
        log.phase = "forward"
        with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
            logits = model(inputs)
            logits.register_hook(lambda gradient: see("logits_gradient", gradient))
            see("logits", logits)
            loss = nn.functional.cross_entropy(logits, targets)
        see("loss", loss)
        log.phase = "backward"
        loss.backward()
    gradients = {short_name(each.grad.dtype) for each in model.parameters() if each.grad is not None}
    seen["parameter_gradients"] = ", ".join(sorted(gradients))
    keys = ("phase", "operator", "inputs", "output", "count")
    seen["operators"] = [dict(zip(keys, (*key, count), strict=True)) for key, count in log.seen.items()]
    return seen


def short_name(dtype: torch.dtype) -> str:
    """Return ``float16`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def _dtypes(values: object) -> str:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return ", ".join(dict.fromkeys(short_name(tensor.dtype) for tensor in tensors))


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
"""They compute nothing; neither do views."""


def classify_operators(device: str, dtype: torch.dtype) -> list[dict[str, object]]:
    """Return for each operator what `classify` finds under autocast to ``dtype``."""
    calls = [(name, unary, 1) for name, unary in _UNARY.items()] + [(name, each, 2) for name, each in _BINARY.items()]
    return [{"operator": name, **classify(function, count, device, dtype)} for name, function, count in calls]


def classify(function: Callable[..., Tensor], inputs: int, device: str, dtype: torch.dtype) -> dict[str, object]:
    """Return whether autocast runs a function of square matrices in float32, in ``dtype`` or in its input's dtype.

    ``runs_in`` follows from the operators that computed something, by the dtype of their first result; it is `MIXED` if
    they differ. ``ran_float32`` and ``ran_low`` name these operators for inputs in float32 and in ``dtype``.
    ``float32``, ``low`` and ``mixed`` are the dtype of the output for such inputs and for one of each; None if torch
    refuses them, or if there is only one input.
    """
    wide = torch.randn(16, 16, device=device)
    narrow = wide.to(dtype)
    low = short_name(dtype)
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
    """Records each operator below autocast that computes floating-point numbers, once for each dtype of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket).removeprefix("aten.")
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if made and not func.is_view and name not in _MOVES:
            entry = (name, short_name(made[0].dtype))
            if entry not in self.ran:
                self.ran.append(entry)
        return result


def _attention(query: Tensor, key: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, key)


def _run(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[str | None, list[tuple[str, str]]]:
    computed = _Computed()
    try:
        with computed:
            return short_name(function(*inputs).dtype), computed.ran
    except RuntimeError:
        return None, computed.ran  # Refusing, say, two dtypes at once is an answer too.


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
