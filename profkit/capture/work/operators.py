"""What an operator does: its matrix products by torch's own formulas, the rest by these.

Outside of matrix products an operator takes, for each element,

- nothing, if it moves, makes, selects, compares or exchanges values, or its result is no floating point;
- one operation for an elementwise function, whatever the function: exp and a sum are alike (tanh, gelu, sigmoid too);
- one for each element that goes into a reduction;
- what `PER_ELEMENT` says of operators that do several of these at once.

Elements are those of the largest floating-point operand or result; of operators on lists, those of the first list.
Integer arithmetic is not counted. Attention on the CPU, for which torch has no formula, is its two products (backward
five) and five operations a score. The softmax inside a fused attention that torch has a formula for is left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import (
    conv_flop_count,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


QUERIES = _names(
    """
    device dim is_contiguous is_non_overlapping_and_dense is_strides_like_format layout numel size storage_offset stride
    sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride
    """
)
"""They ask a tensor about itself; some kinds of tensors dispatch them."""

BLANK = _names("empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize set")
"""They make tensors without values; the values come with the first write."""

OVERWRITING = _names("bernoulli copy exponential fill normal random uniform zero")
"""In place, they do not read what was there before."""

UNREAD = {
    "full_like": ("self",),
    "new_full": ("self",),
    "new_ones": ("self",),
    "new_zeros": ("self",),
    "nll_loss_backward": ("self",),
    "ones_like": ("self",),
    "rand_like": ("self",),
    "randn_like": ("self",),
    "zeros_like": ("self",),
}
"""Arguments that matter only by their shape."""

LOOKED_UP = {
    "embedding": ("weight", None),
    "gather": ("self", None),
    "index": ("self", None),
    "index_select": ("self", None),
    "nll_loss_forward": ("self", "target"),
}
"""An argument of which they read no more than they give, or an element for each of another argument's."""

WRITTEN_IF = dict.fromkeys(("_fused_adagrad", "_fused_adam", "_fused_adamw", "_fused_sgd"), ("grads", "grad_scale"))
"""An argument that is written only if another one is given, whatever the schema says."""

MOVES = _names(
    """
    _amp_foreach_non_finite_check_and_unscale _amp_update_scale _efficientzerotensor _index_put_impl
    _local_scalar_dense _pin_memory _reshape_copy _to_copy _unique2 alias arange argmax argmin argsort as_strided
    bernoulli bucketize cat clone col2im constant_pad_nd copy count_nonzero cummax cummin diag_embed diagonal_backward
    embedding empty histc index_fill isin kthvalue native_channel_shuffle pixel_unshuffle reflection_pad1d
    unique_consecutive view_as_complex
    empty_like empty_permuted empty_strided equal exponential eye fill flip full full_like gather im2col index index_put
    index_select is_pinned isfinite isinf isnan lift_fresh_copy linspace masked_fill masked_scatter masked_select
    max_pool2d_with_indices multinomial new_empty new_empty_strided new_full new_ones new_zeros nll_loss2d_backward
    nll_loss_backward nonzero normal one_hot ones ones_like pin_memory pixel_shuffle rand rand_like randint randint_like
    randn randn_like random randperm record_stream reflection_pad2d repeat repeat_interleave replication_pad2d resize
    roll scalar_tensor scatter searchsorted select_backward select_scatter set slice_backward slice_inverse
    slice_scatter sort split split_with_sizes split_with_sizes_copy stack topk tril tril_indices triu triu_indices
    unfold uniform unique_dim unsafe_split upsample_nearest2d upsample_nearest2d_backward where zero zeros zeros_like
    """
)
"""They move, make, select or compare values: no arithmetic."""

ELEMENTWISE = _names(
    """
    _prelu_kernel _prelu_kernel_backward elu elu_backward floor_divide glu_backward hardshrink_backward
    hardsigmoid_backward hardswish hardswish_backward hardtanh_backward leaky_relu_backward log_sigmoid_backward mish
    mish_backward polar prelu rrelu_with_noise_backward rsub softplus_backward softshrink_backward
    """
)
"""One operation for each element, of operators that torch does not mark as elementwise."""

REDUCTIONS = _names(
    """
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _embedding_bag _is_all_true _is_any_true all amax amin aminmax
    any avg_pool2d avg_pool2d_backward cumprod cumsum dot embedding_dense_backward index_add index_reduce logcumsumexp
    max max_pool2d_with_indices_backward mean median min nansum nll_loss2d_forward nll_loss_forward prod scatter_add
    scatter_reduce sum trace vdot
    """
)
"""One operation for each element that goes in."""

COUNTED = {
    "embedding_dense_backward": "grad_output",
    "index_add": "source",
    "nll_loss2d_forward": "target",
    "nll_loss_forward": "target",
    "scatter_add": "src",
}
"""The argument whose elements count, where it is not the largest operand or result."""

PER_ELEMENT = {
    # the greatest, less it, exp, sum, divide
    "_log_softmax": 5,
    "_safe_softmax": 5,
    "_softmax": 5,
    "logsumexp": 4,
    # with the result y: g y, its sum, less it, times y; of the logarithm: sum, exp, times, less
    "_log_softmax_backward_data": 4,
    "_softmax_backward_data": 4,
    # mean; less it, square, sum; less, times; gain, bias. Backward: the sums for gain and bias, and three for the input
    "_native_batch_norm_legit": 8,
    "cudnn_batch_norm": 8,
    "native_batch_norm": 8,
    "native_group_norm": 8,
    "native_layer_norm": 8,
    "batch_norm_backward": 14,
    "cudnn_batch_norm_backward": 14,
    "native_batch_norm_backward": 14,
    "native_group_norm_backward": 14,
    "native_layer_norm_backward": 14,
    # square, sum; times, gain
    "_fused_rms_norm": 4,
    "_fused_rms_norm_backward": 9,
    "linalg_vector_norm": 2,
    "norm": 2,
    "std": 3,
    "std_mean": 4,
    "var": 3,
    "var_mean": 4,
    # a comparison that selects, a product
    "_fused_dropout": 2,
    "native_dropout": 2,
    "native_dropout_backward": 2,
    "addcdiv": 3,
    "addcmul": 3,
    "lerp": 3,
    "mse_loss": 3,
    "mse_loss_backward": 3,
    "huber_loss": 4,
    "huber_loss_backward": 3,
    "smooth_l1_loss": 4,
    "smooth_l1_loss_backward": 3,
    # two logarithms, two differences, two products, a sum; the difference over x (1 - x), times the gradient
    "binary_cross_entropy": 7,
    "binary_cross_entropy_backward": 5,
    # square, sum; times. Backward: g times v and its sum, and two products
    "_weight_norm_interface": 3,
    "_weight_norm_interface_backward": 4,
    # for each gate: two sums with its biases, a function, and what it lets through
    "_thnn_fused_gru_cell": 5,
    "_thnn_fused_gru_cell_backward": 5,
    "_thnn_fused_lstm_cell": 5,
    "_thnn_fused_lstm_cell_backward_impl": 5,
    # four neighbours along each dimension, weighed and added
    "_upsample_bicubic2d_aa": 16,
    "_upsample_bicubic2d_aa_backward": 16,
    "upsample_bicubic2d": 16,
    "upsample_bicubic2d_backward": 16,
    # four neighbours, weighed and added
    "upsample_bilinear2d": 7,
    "upsample_bilinear2d_backward": 7,
    # p decays; m moves towards g (3); v decays and gets g g times a number (4); root, its correction, epsilon; p moves
    # by m over it times a number (3)
    "_fused_adam": 14,
    "_fused_adamw": 14,
    "_fused_adagrad": 6,
    "_fused_sgd": 4,
}
"""Operations for each element, of operators that take several steps."""

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

_ATTENTION = (
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
)
_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def _grouped_flops(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of products of several groups: without a dimension for the groups their sizes add up to one."""
    groups = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return int(2 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1])


_OWN_FORMULAS = {
    "flex_attention": lambda q, k, v, *_, **__: sdpa_flop_count(q.shape, k.shape, v.shape),
    "flex_attention_backward": lambda q, k, v, out, *_, **__: sdpa_backward_flop_count(
        out.shape, q.shape, k.shape, v.shape
    ),
    "_grouped_mm": _grouped_flops,
}
"""For torch before 2.13, which has the first two: every block counts, whatever the mask leaves out when it runs."""


def product_formula(func: Any) -> Any | None:
    return flop_registry.get(getattr(func, "_overloadpacket", func)) or _OWN_FORMULAS.get(base_name(func))


def has_other_gradient(func: Any, args: Sequence[Any]) -> bool:
    """Return whether torch computes the gradient of this call by another formula while any mode is on.

    The last bits may differ then. Of all operators in torch's own list of samples these two do.
    """
    differentiated = {"prod": args[:1], "masked_fill": args[2:3]}.get(base_name(func), ())
    return any(isinstance(argument, Tensor) and argument.requires_grad for argument in differentiated)


def torch_flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int | None:
    """Return the FLOPs of an operator by torch's own formula, None if torch has none for it.

    torch counts the gradient of a convolution's weights once more for each of its groups; this does not.
    Attention in which several heads of the query share one of key and value counts with a head of their own for each,
    as it runs: torch 2.13's formula does so too, older ones refuse it.
    """
    formula = product_formula(func)
    if formula is None:
        return None
    if base_name(func) == "convolution_backward":
        return _convolution_backward_flops(name_arguments(func, args, kwargs))
    if base_name(func).startswith(_ATTENTION):
        args = _with_own_heads(func, args)
    return int(formula(*args, **kwargs, out_val=out))


def _convolution_backward_flops(given: dict[str, Any]) -> int:
    """Return the FLOPs of the gradients that are asked for: those of input and weights have the forward pass's each."""
    x, weight, gradient = (given[name].shape for name in ("input", "weight", "grad_output"))
    forward = conv_flop_count(x, weight, gradient, transposed=given["transposed"])
    return int(sum(given["output_mask"][:2]) * forward)


def _with_own_heads(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Return an attention's arguments with as many heads of key and value, by their shapes, as the query has."""
    names = [one.name for one in func._schema.arguments]
    at = names.index("query")
    query, key = args[at], args[at + 1]
    if query.dim() != 4 or query.shape[1] == key.shape[1]:
        return args
    shapes = [(one.shape[0], query.shape[1], *one.shape[2:]) for one in args[at + 1 : at + 3]]
    return [*args[: at + 1], *shapes, *args[at + 3 :]]


def other_flops(func: Any, given: dict[str, Any], results: Sequence[Tensor]) -> int | None:
    """Return the FLOPs of an operator without matrix products, None if there is no formula for it."""
    name = base_name(func)
    if name.startswith(_CPU_ATTENTION):
        return _attention_flops(name, given)
    factor = _factor(func, name)
    if not factor or not any(result.is_floating_point() for result in results):
        return factor and 0
    return factor * _element_count(given.get(COUNTED.get(name, "")), given, results)


@cache
def is_made_of_others(func: Any, backend: str) -> bool:
    """Return whether an operator only calls others; in inference mode such operators come.

    Some have a kernel of their own as well (``silu_backward``), which does not give the same to the bit.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    own = (backend, "CompositeExplicitAutograd")
    return has(func.name(), "CompositeImplicitAutograd") and not any(has(func.name(), key) for key in own)


def name_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments by name; of an operator without a schema by their number."""
    schema = getattr(func, "_schema", None)
    arguments = () if schema is None else schema.arguments
    names = [one.name for one in arguments] or [str(place) for place in range(len(args))]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def base_name(func: Any) -> str:
    """Return an operator's name without namespace, overload, ``_foreach_`` and the underscore of in-place ones."""
    packet = getattr(func, "_overloadpacket", func)
    name = getattr(packet, "__name__", str(packet)).removeprefix("_foreach_")
    return re.sub(r"(?<=[a-z0-9])_$", "", name)


def dtype_name(func: Any, tensors: Sequence[Tensor]) -> str:
    """Return the type in which an operator's products are done: that of its first floating-point operand.

    fp32 is "tf32" on a GPU that has it, where torch's setting for matrix products or for convolutions allows it.
    """
    operand = next((one for one in tensors if one.is_floating_point()), None)
    if operand is None:
        return "integer"
    name = DTYPES.get(operand.dtype, str(operand.dtype).removeprefix("torch."))
    if name != "fp32" or operand.device.type != "cuda":
        return name
    allowed = _allows_tf32(is_convolution="conv" in base_name(func))
    return "tf32" if allowed and torch.cuda.get_device_capability(operand.device)[0] >= 8 else name


def _allows_tf32(*, is_convolution: bool) -> bool:
    """Return whether torch may do fp32 products in TF32: since 2.9 ``fp32_precision`` says so, however it was set."""
    backend = getattr(torch.backends.cudnn, "conv", None) if is_convolution else torch.backends.cuda.matmul
    precision = getattr(backend, "fp32_precision", None)
    if precision is not None:
        return bool(precision == "tf32")
    return bool(torch.backends.cudnn.allow_tf32 if is_convolution else torch.backends.cuda.matmul.allow_tf32)


def masked_flops(func: Any, given: dict[str, Any], flops: int) -> int:
    """Return how much of an attention's FLOPs goes into keys that its causal mask hides: query q sees keys 0 to q."""
    query, key = given.get("query"), given.get("key")
    is_causal = given.get("is_causal") or given.get("custom_mask_type") == 1
    if not is_causal or query is None or key is None or query.dim() != 4:
        return 0
    # _efficient_attention_forward has (batch, position, head, channel); all others (batch, head, position, channel)
    position = 1 if base_name(func).startswith(("_efficient_attention", "_flash_attention")) else 2
    queries, keys = query.shape[position], key.shape[position]
    seen = sum(min(q + 1, keys) for q in range(queries))
    return flops - flops * seen // (queries * keys)


def recomputed_flops(func: Any, given: dict[str, Any], flops: int) -> int:
    """Return how much of a fused attention's backward FLOPs computes the scores again, which its forward did not keep.

    Of its five products this is one: with q channels of query and key and v of value, q of 3 q + 2 v.

    Args:
        given: its arguments by name; those of flex attention by their number.
    """
    if not base_name(func).endswith("attention_backward"):
        return 0
    query, value = given.get("query", given.get("0")), given.get("value", given.get("2"))
    if not isinstance(query, Tensor) or not isinstance(value, Tensor):
        return 0
    channels, value_channels = query.shape[-1], value.shape[-1]
    return flops * channels // (3 * channels + 2 * value_channels)


def _attention_flops(name: str, given: dict[str, Any]) -> int:
    batch, heads, queries, channels = given["query"].shape
    keys = given["key"].shape[-2]
    products = 5 if name.endswith("backward") else 2
    return int((2 * products * channels + 5) * batch * heads * queries * keys)


def _factor(func: Any, name: str) -> int | None:
    if name in MOVES or "c10d" in getattr(func, "namespace", ""):
        return 0
    if name in PER_ELEMENT:
        return PER_ELEMENT[name]
    if name in REDUCTIONS or name in ELEMENTWISE:
        return 1
    if torch.Tag.pointwise in getattr(func, "tags", ()) or "_foreach_" in str(func):
        return 1
    return None


def _element_count(counted: Tensor | None, given: dict[str, Any], results: Sequence[Tensor]) -> int:
    if counted is not None:
        return counted.numel()
    first = next(iter(given.values()), None)
    if isinstance(first, list | tuple) and first and isinstance(first[0], Tensor):
        return sum(one.numel() for one in first)
    operands = [one for one in given.values() if isinstance(one, Tensor)]
    return max(one.numel() for one in (*operands, *results) if one.is_floating_point())
