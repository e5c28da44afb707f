"""The command that shows a report's numbers again, with the values that differ from row to row in capital letters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recipes.common.recipe import Row
from recipes.model_memory.cells import BATCH, KEYS, name_of


def tell_command(rows: Sequence[Row], *, recorded: bool) -> str:
    """Return what measures any of some rows again, and reads its recording where there is one.

    What all rows have in common is filled in; the rest, such as ``CONTEXT``, is as the row says whose number it is.
    """
    setting = {key: _common(rows, key) for key in ("device", *KEYS)}
    given = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in setting.items())
    command = f"`python -m recipes.memory_questions {given} -o again"
    if recorded:
        command += f" --keep-captures captures`, then `profkit memory captures/{name_of(setting)}"
    notes = "".join(f"; {note}" for note in _notes([key for key in setting if setting[key] == key.upper()], recorded))
    return (
        f"Every number again: {command}`{notes}. `again/memory_questions.md` then says of that row what this one does."
    )


def _common(rows: Sequence[Row], key: str) -> object:
    values = {row[key] for row in rows}
    return values.pop() if len(values) == 1 else key.upper()


def _notes(open_keys: Sequence[str], recorded: bool) -> Iterator[str]:
    if open_keys:
        yield f"{', '.join(f'`{key.upper()}`' for key in open_keys)} as the sentence or row says"
    if "checkpoint_layers" in open_keys:
        yield "without checkpoints `0`" + ", and no `-checkpointCHECKPOINT_LAYERS`" * recorded
    if "batch" in open_keys and recorded:
        yield f"no `-batchBATCH` for {BATCH}"
