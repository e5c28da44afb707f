"""The matrix products of an FX graph's nodes, and which launch of compiled code does them.

A product counts as torch's FlopCounterMode counts it, with the shapes in ``meta["val"]``, and for one launch alone:

- a call of a library or a template that has the product's node does it;
- else the first launch that has the node: a fused kernel, where Inductor made the product elementwise. It does so with
  products of few rows or columns, before there is a graph to see: what is left is a multiplication of two tensors which
  says in ``original_aten`` what it was. Each element of its result stands for one multiplication and one addition.

A product that Inductor padded counts unpadded, as the program asks for it. A size that is a symbol is not known here:
the launch's work is None then, and so it is where an operator of another library has no formula.

Nothing here reads a symbol's value in a way that torch would take for a condition of the program.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from profkit.capture.work import Products
from profkit.capture.work.operators import (
    base_name,
    dtype_name,
    masked_flops,
    name_arguments,
    product_formula,
    recomputed_flops,
    torch_flops,
)

_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm"})
_OTHER_LIBRARIES = frozenset({"mkl", "mkldnn", "mkldnn_prepacked", "onednn", "quantized"})
_TRITON = ("triton_kernel_wrapper_mutation", "triton_kernel_wrapper_functional")
_PRODUCT_SUM = "mm_plus_mm"
_PAD = "constant_pad_nd"


class Called(NamedTuple):
    """What a node calls and with what; ``meta`` says where it comes from, its ``val`` what it returns."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]


_KEEP_RANDOM_STATE = ("graphsafe_run_with_rng_state", "run_and_save_rng_state", "run_with_rng_state")


def called(node: fx.Node) -> Called:
    """Return the operator of the program that a node calls.

    Activation checkpointing has an operator that could draw random numbers, as attention, called by another one that
    keeps the generator's state. That one has no origin; what takes the operator's several results apart has.
    """
    if base_name(node.target) not in _KEEP_RANDOM_STATE:
        return Called(node.target, node.args, node.kwargs, node.meta)
    at = next(number for number, arg in enumerate(node.args) if callable(arg) and not isinstance(arg, fx.Node))
    known = [part.meta for part in _parts(node) if "stack_trace" in part.meta or "nn_module_stack" in part.meta]
    value = node.meta.get("val")
    if base_name(node.target) == "run_and_save_rng_state" and isinstance(value, tuple):
        value = value[1]  # the state is the first
    kwargs = {name: arg for name, arg in node.kwargs.items() if name != "rng_state"}
    return Called(node.args[at], node.args[at + 1 :], kwargs, {**(known[0] if known else {}), "val": value})


def _parts(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if user.target is getitem:
            yield user
            yield from _parts(user)


class _UnknownSize(Exception):
    """A size is a symbol."""


def work_of_launches(
    nodes_of: Sequence[Collection[fx.Node]], is_product_call: Sequence[bool], *, is_backward: bool = False
) -> list[Products | None]:
    """Return the matrix products of each launch of one graph, None where they are not known.

    Args:
        nodes_of: of each launch, in the order of the generated code, the FX nodes that it computes or touches.
        is_product_call: of each launch, whether it calls a library or was made from a template.
        is_backward: whether this is the graph of a backward pass: what a checkpoint computes again lies in it.
    """
    doer: dict[fx.Node, int] = {}
    for wanted in (True, False):
        for launch, nodes in enumerate(nodes_of):
            if bool(is_product_call[launch]) is wanted:
                for node in nodes:
                    doer.setdefault(node, launch)
    work: list[Products | None] = [Products() for _ in nodes_of]
    for node, launch in doer.items():
        known, of_node = work[launch], work_of_node(node, is_backward=is_backward)
        work[launch] = None if known is None or of_node is None else known + of_node
    return work


def work_of_node(node: fx.Node, *, is_backward: bool = False) -> Products | None:
    """Return the matrix products of an FX node below autograd; None where a size or a formula is not known."""
    if node.op != "call_function":
        return Products()
    try:
        return _work_of_call(node, is_backward)
    except Exception:  # whatever torch's formulas do not foresee must not end a compilation
        return None


def _work_of_call(node: fx.Node, is_backward: bool) -> Products | None:
    target, its_args, its_kwargs, meta = called(node)
    name = base_name(target)
    if getattr(target, "namespace", "") in _OTHER_LIBRARIES or name in _TRITON:
        return None
    operands = [operand for operand in (_value(arg) for arg in node.all_input_nodes) if isinstance(operand, Tensor)]
    given: dict[str, Any] = {}
    try:
        if product_formula(target) is not None:
            args, kwargs = _stand_in(its_args), _stand_in(its_kwargs)
            if name in _PRODUCTS:
                args = tuple(_unpadded(node, number, value) for number, value in enumerate(args))
            given = name_arguments(target, args, kwargs)
            flops = torch_flops(target, args, kwargs, _stand_in(meta["val"])) or 0
        elif name == _PRODUCT_SUM:
            first, second, third, fourth = (_stand_in(arg) for arg in node.args[:4])
            flops = _product_flops(first, second) + _product_flops(third, fourth)
        elif name == "mul" and _is_left_of_product(node):
            flops = 2 * _stand_in(node.meta["val"]).numel()
        else:
            return Products()
    except _UnknownSize:
        return None
    again = flops if is_backward and _is_of_forward(meta) else recomputed_flops(target, given, flops)
    return Products(flops, dtype_name(target, operands), masked_flops(target, given, flops), again)


def _product_flops(left: Tensor, right: Tensor) -> int:
    return 2 * left.shape[0] * left.shape[1] * right.shape[1]


def _is_left_of_product(node: fx.Node) -> bool:
    was = node.meta.get("original_aten")
    factors = [_value(arg) for arg in node.args if isinstance(arg, fx.Node)]
    return (
        was is not None and base_name(was) in _PRODUCTS and sum(isinstance(factor, Tensor) for factor in factors) == 2
    )


def _unpadded(node: fx.Node, number: int, value: Any) -> Any:
    arg = node.args[number]
    if not isinstance(arg, fx.Node) or base_name(arg.target) != _PAD:
        return value
    was = arg.meta.get("original_aten")
    return _stand_in(arg.args[0]) if was is not None and base_name(was) in _PRODUCTS else value


def _is_of_forward(meta: dict[str, Any]) -> bool:
    tag = meta.get("partitioner_tag")
    return tag == "is_forward" or (tag is None and "nn_module_stack" in meta and "fwd_nn_module_stack" not in meta)


def _value(arg: Any) -> Any:
    return arg.meta.get("val") if isinstance(arg, fx.Node) else arg


def _stand_in(arg: Any) -> Any:
    value = _value(arg)
    if isinstance(value, Tensor):
        sizes = [_number(size) for size in value.shape]
        with _disable_current_modes():
            return torch.empty(sizes, dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        kind = type(value) if type(value) in (list, tuple) else tuple
        return kind(map(_stand_in, value))
    if isinstance(value, dict):
        return {key: _stand_in(inner) for key, inner in value.items()}
    return _number(value) if isinstance(value, torch.SymInt) else value


def _number(size: Any) -> int:
    if isinstance(size, int):
        return size
    number = size.node.maybe_as_int()
    if number is None:
        raise _UnknownSize
    return int(number)
