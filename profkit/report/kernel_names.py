"""Kernel names that a person can tell apart in a table."""

from __future__ import annotations

import re

# What every instance of a family shares and no reader needs: return types, namespaces, wrappers around the one functor
# that matters, casts of template integers, argument packs.
_NOISE = re.compile(
    r"\bvoid (?=\S)|\(anonymous namespace\)::|<unnamed>::|\bat::native::|\bat::|\bc10::|\bcutlass::(?=Kernel)"
    r"|\((?:unsigned )?(?:int|long|bool)\)|, std::array<char ?\*, \w+>|_execute_kernel__5x_cublas"
    r"|gpu_kernel_impl(?:_nocast)?<(?=\S)"
)
_LAMBDA = re.compile(r"::\[?\{?lambda\([^)]*\)[^\]}>]*[\]}]?(?:::operator\(\)\([^)]*\)(?: const)?)?")
_LEADING_INTEGERS = re.compile(r"(?<=kernel<)(?:\d+, )+")


def simplify_name(name: str) -> str:
    """Return a demangled name without its return type, its argument list and what its whole family shares.

    For reading only: two kernels may read alike; the full name is what counts and what JSON and CSV carry.
    """
    bare = name
    if bare.endswith(")"):
        bare = bare[: _start_of_arguments(bare)].rstrip()
    bare = _LEADING_INTEGERS.sub("", _NOISE.sub("", _LAMBDA.sub("", bare)))
    return bare or name


def _start_of_arguments(name: str) -> int:
    """Return where the last, outermost parenthesis of a name opens; its length if none does."""
    depth = 0
    for at in range(len(name) - 1, -1, -1):
        if name[at] == ")":
            depth += 1
        elif name[at] == "(":
            depth -= 1
            if depth == 0:
                return at
    return len(name)
