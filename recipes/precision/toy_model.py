"""The toy model, and the dtypes that hooks see in one training step of it under autocast."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BATCH, FEATURES, CLASSES = 32, 20, 5


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
    """Writes down every operator below autocast, which has put its casts in by then, with the dtypes of its tensors."""

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
    """Run forward, loss and backward of the toy model and return the dtype of each part, and of each operator.

    Weights are float32. ``dtype`` float32 is without autocast.
    """
    model = ToyModel(FEATURES, CLASSES).to(device)
    inputs = torch.randn(BATCH, FEATURES, device=device)
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
