"""When a step waits for its launches."""

from __future__ import annotations

BUSY = 0.85
"""Of its time without a profiler a step's kernels fill this and more, or its launches bound it: then the host's speed
decides, and it takes other times on another host, and in another process."""
