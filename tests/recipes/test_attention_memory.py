"""What autograd keeps for attention, counted on the CPU and worked out without memory; the figures of two write-ups."""

from __future__ import annotations

import math
import weakref

import pytest
import torch

from recipes.attention.arithmetic import saved_bytes, work_out
from recipes.attention.growth import fit_exponent, project_limit
from recipes.attention.implementations import find_attention
from recipes.attention.names import (
    BATCH,
    CAUSAL,
    CHECKPOINTED,
    COMPILED,
    FUSED,
    IMPLEMENTATIONS,
    MIB,
    SDPA,
    WRITTEN,
    WRITTEN_AMAX,
)

# As printed with six digits, on two GPUs, for d_model 16.
PUBLISHED_MIB = {256: "4.02344", 1024: "64.0938", 4096: "1024.38", 8192: "4096.75", 16384: "16385.5"}
EAGER = [name for name in IMPLEMENTATIONS if name not in (COMPILED, SDPA)]


def _inputs(seq_len: int, d_model: int = 16, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(BATCH, seq_len, d_model, dtype=dtype, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("seq_len", [256, 1024])
def test_what_is_kept_on_the_cpu_is_what_was_published(seq_len: int) -> None:
    kept = saved_bytes(find_attention(WRITTEN), _inputs(seq_len))
    assert f"{kept / MIB:.6g}" == PUBLISHED_MIB[seq_len]


@pytest.mark.parametrize("seq_len", PUBLISHED_MIB)
def test_what_is_worked_out_is_what_was_published(seq_len: int) -> None:
    assert f"{work_out(WRITTEN, seq_len, 16, torch.float32).saved_bytes / MIB:.6g}" == PUBLISHED_MIB[seq_len]


def _kept(name: str, seq_len: int, width: int) -> int:
    """Bytes by hand, a tensor each: scores-sized ones, then per row; 8 bytes for a place, 1 for a mask's entry."""
    square, row = BATCH * seq_len**2, BATCH * seq_len
    return {
        WRITTEN: 2 * square * width + row * (8 + width),  # exp, P; place of the maximum, sum
        WRITTEN_AMAX: 3 * square * width + row * 2 * width,  # scores, exp, P; maximum, sum
        FUSED: square * width,  # P
        CAUSAL: 2 * square * width + row * (8 + width) + seq_len**2,  # as written, and the mask
        CHECKPOINTED: 0,
    }[name]


@pytest.mark.parametrize("name", EAGER)
@pytest.mark.parametrize(("seq_len", "d_model"), [(32, 16), (96, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counted_worked_out_and_by_hand_agree(name: str, seq_len: int, d_model: int, dtype: torch.dtype) -> None:
    counted = saved_bytes(find_attention(name), _inputs(seq_len, d_model, dtype))
    assert counted == work_out(name, seq_len, d_model, dtype).saved_bytes == _kept(name, seq_len, dtype.itemsize)


def test_counting_holds_nothing() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        powers = torch.exp(query @ key.transpose(-2, -1))
        made.append(weakref.ref(powers))
        return powers @ value

    assert saved_bytes(attention, _inputs(16)) > 0
    assert made[0]() is None


def test_torchs_own_keeps_its_output_and_a_number_a_row() -> None:
    assert saved_bytes(find_attention(SDPA), _inputs(64)) == BATCH * 64 * (16 + 1) * 4


def test_the_peak_of_forward_is_four_score_matrices_and_what_is_small() -> None:
    result = work_out(WRITTEN, 512, 16, torch.float32)
    square, row, tensor = BATCH * 512**2 * 4, BATCH * 512, BATCH * 512 * 16 * 4
    assert result.input_bytes == 4 * tensor
    assert result.peak_bytes("forward") == 4 * square + row * (8 + 4) + 5 * tensor
    names = [live.name for live in result.peaks["forward"]]
    assert names == ["Q", "K", "V", "dO", "S = Q·Kᵀ/√d", "place of the row maximum", "S − maximum", "exp(S − maximum)",
                     "row sum", "P", "O"]  # fmt: skip


def test_a_checkpoint_lowers_what_is_kept_and_not_backwards_peak() -> None:
    plain, checkpointed = (work_out(name, 512, 16, torch.float32) for name in (WRITTEN, CHECKPOINTED))
    assert checkpointed.saved_bytes == 0 < plain.saved_bytes
    assert checkpointed.peak_bytes("backward") == plain.peak_bytes("backward")


@pytest.mark.parametrize("name", [name for name in EAGER if name != CAUSAL] + [SDPA])
def test_the_implementations_compute_the_same(name: str) -> None:
    inputs = _inputs(48, dtype=torch.float64)
    expected = find_attention(WRITTEN)(*inputs)
    torch.testing.assert_close(find_attention(name)(*inputs), expected)


def test_causal_is_torchs_causal() -> None:
    inputs = _inputs(48, dtype=torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
    torch.testing.assert_close(find_attention(CAUSAL)(*inputs), expected)


def test_the_power_of_a_growth() -> None:
    assert fit_exponent([(size, 7.0 * size**1.5) for size in (2, 8, 32)]) == pytest.approx(1.5)
    assert fit_exponent([(2, 1.0), (2, 1.0)]) is None


@pytest.mark.parametrize("square", [0.0, 64.0, 256.0])
def test_where_memory_ends(square: float) -> None:
    """The true limit of a polynomial, found by trying every length."""

    def used(size: int) -> float:
        return square * size**2 + 4096 * size + 2e6

    points = [(size, used(size)) for size in (256, 1024, 4096, 8192)]
    limit = project_limit(points, 1e9)
    assert limit is not None
    expected = next(size for size in range(1, 10**6) if used(size + 1) > 1e9)
    assert math.isclose(limit, expected, abs_tol=1)
    assert project_limit(points[:2], 1e9) is None
