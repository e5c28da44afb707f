"""Where a program waits for data: around each batch that an iterator of torch's ``DataLoader`` hands out.

All loops come through the same door, with workers or without: a plain ``for``, Lightning, accelerate, Hugging Face's
trainer. Making the iterator counts too: there workers start, or begin the next epoch. What a program reads in any other
way, from a generator say, nobody sees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.data import dataloader


class DataLoading:
    """Calls ``begins`` and ``ends`` around each wait for a data loader, on the thread that waits.

    A loader that reads from another one, in the same process, waits within its own wait: both are reported.
    """

    def __init__(self, begins: Callable[[], None], ends: Callable[[], None]) -> None:
        self._begins = begins
        self._ends = ends

    def install(self) -> None:
        """Begin to watch; what torch does not have under these names is not watched."""
        for owner, name in (("DataLoader", "__iter__"), ("_BaseDataLoaderIter", "__next__")):
            kind = getattr(dataloader, owner, None)
            method = getattr(kind, name, None)
            if method is not None:
                setattr(kind, name, self._around(method))

    def _around(self, method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(method)
        def waited(loader: Any) -> Any:
            self._begins()
            try:
                return method(loader)
            finally:
                self._ends()

        return waited
