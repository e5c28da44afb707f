"""What is known of torch's operators by name (without namespace, overload, ``_foreach_``, and in place or not)."""

from __future__ import annotations


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
"""Arguments of which they take the shape alone."""

LOOKED_UP = {
    "embedding": ("weight", None),
    "gather": ("self", None),
    "index": ("self", None),
    "index_select": ("self", None),
    "nll_loss_forward": ("self", "target"),
}
"""An argument of which they read no more than they give, or an element for each of another argument's."""

MOVES = _names(
    """
    _amp_foreach_non_finite_check_and_unscale _amp_update_scale _efficientzerotensor _index_put_impl
    _local_scalar_dense _pin_memory _reshape_copy _to_copy _unique2 alias arange argmax argmin argsort as_strided
    bernoulli bucketize cat clone col2im constant_pad_nd copy count_nonzero diag_embed diagonal_backward embedding empty
    empty_like empty_permuted empty_strided equal exponential eye fill flip full full_like gather im2col index index_put
    index_select isfinite isinf isnan lift_fresh_copy linspace masked_fill masked_scatter masked_select
    max_pool2d_with_indices multinomial new_empty new_empty_strided new_full new_ones new_zeros nll_loss2d_backward
    nll_loss_backward nonzero normal one_hot ones ones_like pin_memory pixel_shuffle rand rand_like randint randint_like
    randn randn_like random randperm record_stream reflection_pad2d repeat repeat_interleave replication_pad2d resize
    roll scalar_tensor scatter searchsorted select_backward select_scatter set slice_backward slice_inverse
    slice_scatter sort split split_with_sizes split_with_sizes_copy stack topk tril tril_indices triu triu_indices
    unfold uniform unique_dim unsafe_split upsample_nearest2d upsample_nearest2d_backward where zero zeros zeros_like
    """
)
"""They move, make, select or compare values: no arithmetic."""

REDUCTIONS = _names(
    """
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _embedding_bag all amax amin aminmax any avg_pool2d
    avg_pool2d_backward cumprod cumsum dot embedding_dense_backward index_add index_reduce logcumsumexp max
    max_pool2d_with_indices_backward mean median min nansum nll_loss2d_forward nll_loss_forward prod scatter_add
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
    # p decays; m moves towards g (3); v decays and gets g g times a number (4); root, its correction, epsilon; p moves
    # by m over it times a number (3)
    "_fused_adam": 14,
    "_fused_adamw": 14,
    "_fused_adagrad": 6,
    "_fused_sgd": 4,
}
"""Operations for each element, of operators that take several steps."""
