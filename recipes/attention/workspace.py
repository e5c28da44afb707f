"""What is allocated between two passes beside the tensors that are known to be: the libraries' workspaces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recipes.attention.names import BATCH, ITEM_BYTES, MIB
from recipes.common.recipe import whole

_TOLERATED_MIB = 2.0
"""Libraries' workspaces may come a size later than the first: cuBLASLt's is 1 MiB for a thread."""


def workspace_mib(row: Mapping[str, Any], phase: str) -> float | None:
    """Return the MiB of workspace; backward, on a thread of its own, has handles and workspaces of its own.

    It is what stays beside Q, K, V and dO, and before backward also beside O and what is kept for it. None where memory
    was not measured.
    """
    each = BATCH * whole(row["seq_len"]) * whole(row["d_model"]) * ITEM_BYTES[row["dtype"]] / MIB
    if phase == "forward":
        before, known = row.get("mem_after_inputs_MiB"), each * 4
    else:
        before, known = row.get("mem_before_backward_MiB"), each * 5 + (row.get("saved_activations_MiB") or 0.0)
    return None if before is None else before - known


def find_held(series: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence if what stays between passes grows with the sequence length: a workspace does not.

    Args:
        series: rows of one implementation, dtype and width.
    """
    for phase in ("forward", "backward"):
        found = [(mib, row) for row in series if (mib := workspace_mib(row, phase)) is not None]
        if not found:
            continue
        least, most = min(found, key=lambda each: each[0]), max(found, key=lambda each: each[0])
        if most[0] - least[0] > _TOLERATED_MIB:
            row = most[1]
            yield (
                f"before {phase}, {most[0]:,.6g} MiB are allocated beside all tensors that are known to be there, at "
                f"d_model {row['d_model']}, seq_len {row['seq_len']}, {row['implementation']}, {row['dtype']}, and "
                f"{least[0]:,.6g} MiB at seq_len {least[1]['seq_len']}: that is no workspace, something of an earlier "
                "pass is held, and stands in the peaks"
            )
