"""Kernel names that a person can tell apart in a table."""

from __future__ import annotations

import re

# Words that every instance of a template family carries, and that tell no two of them apart.
_COMMON_TEXT = """
    void const unsigned signed int long bool char std array at native cuda detail memory anonymous namespace unnamed
    operator lambda instance gpu_kernel_impl gpu_kernel_impl_nocast TensorIteratorBase TrivialOffsetCalculator
    OffsetCalculator LoadWithoutCast StoreWithoutCast func_wrapper_t ReduceOp binary_internal opmath_gpu_kernel
    TensorIterator TensorListMetadata TensorListScalarListMetadata TensorListScalarTensorListMetadata OpMathType
    c10 cutlass cub thrust Params size_t uint32_t int64_t ul false true
"""
_COMMON = frozenset(_COMMON_TEXT.split())
_UNNAMED = re.compile(r"(<unnamed>|\(anonymous namespace\))::")
_WORD = re.compile(r"[A-Za-z_]\w*")
_PLACEHOLDER = re.compile(r"T\d+$")
# A product that was split along its inner dimension has a second kernel, which adds up its parts: that word stays.
_GEMM_DETAILS = re.compile(r"_stage\d+.*?(?=_split_k_kernel|$)|_execute_kernel__\w+$|(?<=_split_k)_kernel__\w+$")


def simplify_name(name: str) -> str:
    """Return what tells a kernel from others of its family: the function, and the telling words of its template.

    ``void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>, …>(…)`` reads
    ``vectorized_elementwise_kernel<CUDAFunctor_add,float>``. For reading only: two kernels may read alike; the full
    name is what counts and what JSON and CSV carry.
    """
    function, _, template = _without_arguments(_UNNAMED.sub("", name)).partition("<")
    function = _GEMM_DETAILS.sub("", function.rsplit("::", 1)[-1].removeprefix("void ").strip()).replace("tilesize", "")
    words = dict.fromkeys(
        word for word in _WORD.findall(template) if word not in _COMMON and not _PLACEHOLDER.match(word)
    )
    words.pop(function, None)
    if not function:
        return name
    return f"{function}<{','.join(words)}>" if words else function


def _without_arguments(name: str) -> str:
    """Return a name without the argument list at its end."""
    if not name.endswith(")"):
        return name
    depth = 0
    for at in range(len(name) - 1, -1, -1):
        depth += (name[at] == ")") - (name[at] == "(")
        if depth == 0:
            return name[:at] if at else name
    return name
