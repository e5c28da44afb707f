"""Attention: memory counted on the CPU and worked out without any, measured cells, and what the report shows."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from recipes.attention import measure
from recipes.attention.cells import (
    BATCH,
    CAUSAL,
    CHECKPOINTED,
    COMPILED,
    FUSED,
    GRIDS,
    IMPLEMENTATIONS,
    SDPA,
    WRITTEN,
    WRITTEN_AMAX,
    build_cells,
)
from recipes.attention.memory import find_attention, saved_bytes, work_out
from recipes.attention.report import report
from recipes.common.measuring import MIB

# As printed with six digits, on two GPUs, for d_model 16.
PUBLISHED_MIB = {256: "4.02344", 1024: "64.0938", 4096: "1024.38", 8192: "4096.75", 16384: "16385.5"}
EAGER = [name for name in IMPLEMENTATIONS if name not in (COMPILED, SDPA)]


def _inputs(seq_len: int, d_model: int = 16, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(BATCH, seq_len, d_model, dtype=dtype, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("seq_len", PUBLISHED_MIB)
def test_memory_worked_out_is_the_published_one(seq_len: int) -> None:
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


def test_counting_keeps_no_tensor_alive() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        powers = torch.exp(query @ key.transpose(-2, -1))
        made.append(weakref.ref(powers))
        return powers @ value

    assert saved_bytes(attention, _inputs(16)) > 0
    assert made[0]() is None


def test_the_peak_of_forward_is_four_score_matrices_and_small_tensors() -> None:
    result = work_out(WRITTEN, 512, 16, torch.float32)
    square, row, tensor = BATCH * 512**2 * 4, BATCH * 512, BATCH * 512 * 16 * 4
    assert result.input_bytes == 4 * tensor
    assert result.peak_bytes("forward") == 4 * square + row * (8 + 4) + 5 * tensor
    names = [live.name for live in result.peaks["forward"]]
    assert names == ["Q", "K", "V", "dO", "S = Q·Kᵀ/√d", "place of the row maximum", "S − maximum", "exp(S − maximum)",
                     "row sum", "P", "O"]  # fmt: skip
    checkpointed = work_out(CHECKPOINTED, 512, 16, torch.float32)
    assert checkpointed.peak_bytes("backward") == result.peak_bytes("backward")


@pytest.mark.parametrize("name", [*EAGER, SDPA])
def test_the_implementations_compute_what_torch_does(name: str) -> None:
    inputs = _inputs(48, dtype=torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=name == CAUSAL)
    torch.testing.assert_close(find_attention(name)(*inputs), expected)


def _cell(name: str = WRITTEN, seq_len: int = 64) -> dict[str, Any]:
    return {"d_model": 16, "seq_len": seq_len, "implementation": name, "dtype": "fp32", "passes": 3}


def test_a_cell_on_the_cpu_has_times_and_no_memory() -> None:
    row: dict[str, Any] = measure.measure_cell(_cell(), "cpu")
    assert row["status"] == "ok"
    for part in ("forward", "backward", "forward_backward"):
        assert len(row[f"{part}_samples_ms"]) == 3
        assert 0 < min(row[f"{part}_samples_ms"]) <= row[f"{part}_ms"] <= max(row[f"{part}_samples_ms"])
        assert row[f"{part}_std_ms"] > 0
    pairs = zip(row["forward_samples_ms"], row["backward_samples_ms"], strict=True)
    assert row["forward_backward_samples_ms"] == [forward + backward for forward, backward in pairs]
    # Only CUDA counts these.
    memory = [key for key in row if key.startswith("mem_") or key.endswith("_peak_MiB")]
    assert len(memory) == 5
    assert {row[key] for key in memory} == {None}
    assert row["bytes_per_seq2"] == row["saved_activations_MiB"] * MIB / 64**2


def _ending_in(phase: str) -> Callable[[str], Any]:
    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, query: torch.Tensor, _key: torch.Tensor, _value: torch.Tensor) -> torch.Tensor:
            if phase == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …")
            return query.clone()

        @staticmethod
        def backward(_ctx: Any, *_gradients: torch.Tensor) -> Any:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")

    return lambda _name: Attention.apply


@pytest.mark.parametrize(("phase", "requested"), [("forward", 2 << 30), ("backward", 4096)])
def test_running_out_of_memory_names_the_phase(monkeypatch: pytest.MonkeyPatch, phase: str, requested: int) -> None:
    monkeypatch.setattr(measure, "find_attention", _ending_in(phase))
    row: dict[str, Any] = measure.measure_cell(_cell(), "cpu")
    assert (row["status"], row["requested_bytes"]) == (f"OOM({phase})", requested)
    assert row["free_bytes"] > 0
    # Forward is timed alone where it fits alone.
    assert ("forward_ms" in row) == (phase == "backward")
    assert "backward_ms" not in row


def test_predictions_for_compiled_and_fused_attention_are_lower_bounds() -> None:
    whole, compiled, fused = (measure.predict_bytes(_cell(name, 1024), "cpu") for name in (WRITTEN, COMPILED, SDPA))
    assert fused < compiled < whole
    square = 8 * 1024**2 * 4
    assert 6 * square < whole < 6.2 * square  # backward's peak
    assert 2 * square < compiled < 2.1 * square  # exp and P


def test_the_shortest_sequences_come_first_written_and_compiled() -> None:
    cells = build_cells(GRIDS["reports"], 100)
    assert [cell["seq_len"] for cell in cells[:5]] == [256, 1024, 4096, 8192, 16384]
    assert {cell["implementation"] for cell in cells[:10]} == {WRITTEN, COMPILED}


def _gpu_rows() -> list[dict[str, Any]]:
    """Rows as a GPU would give them: 16 MiB of workspace, peaks as worked out, one cell out of memory."""
    rows = []
    for seq_len in (256, 512, 1024, 2048):
        row: dict[str, Any] = {**_cell(seq_len=seq_len), "status": "ok", "forward_ms": 1.0, "backward_ms": 2.0}
        row["accounting"] = {
            phase: [vars(live) for live in lives]
            for phase, lives in work_out(WRITTEN, seq_len, 16, torch.float32).peaks.items()
        }
        sums = {
            phase: sum(live["bytes"] for live in row["accounting"][phase]) / MIB for phase in ("forward", "backward")
        }
        row |= {
            "saved_activations_MiB": (64 * seq_len**2 + 96 * seq_len) / MIB,
            "mem_after_inputs_MiB": 16 + 8 * seq_len * 16 * 4 * 4 / MIB,
            "forward_peak_MiB": sums["forward"] + 16,
            "mem_before_backward_MiB": 20 + 8 * seq_len * 16 * 4 * 5 / MIB + (64 * seq_len**2 + 96 * seq_len) / MIB,
            "backward_peak_MiB": sums["backward"] + 20 + 1,
        }
        rows.append(row)
    return rows


def test_memory_left_by_an_earlier_pass_is_reported() -> None:
    """As it was on an H200 while counting held a score matrix and the maximum's place."""
    rows = _gpu_rows()
    free = report(rows, {"free_bytes": None}).markdown
    for row in rows:
        row["mem_before_backward_MiB"] += 8 * row["seq_len"] * (row["seq_len"] * 4 + 8) / MIB
    assert "left something behind" not in free
    said = report(rows, {"free_bytes": None}).markdown
    assert "before backward, 148.125 MiB belong to no known tensor at d_model 16, seq_len 2048" in said
    assert "and 22.0156 MiB at seq_len 256: a workspace does not grow" in said
