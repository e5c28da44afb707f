"""A naive caching allocator that records itself: the slow, searching counterpart of the replay.

Written from the rules of c10/cuda/CUDACachingAllocator.cpp, with lists and linear searches and none of the replay's
shortcuts. It keeps the allocator's statistics, so that a test can ask of a replay what torch would say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MIB = 2**20
SMALL_PAGE, LARGE_PAGE = 2 * MIB, 20 * MIB
RESERVATION = 2**36


@dataclass(eq=False)
class Block:
    address: int
    size: int
    region: Region
    state: str = "inactive"  # or active_allocated, active_pending_free, unmapped
    requested: int = 0


@dataclass(eq=False)
class Region:
    stream: int
    pool: tuple[int, int]
    is_small: bool
    is_expandable: bool
    blocks: list[Block] = field(default_factory=list)


class Stat:
    def __init__(self) -> None:
        self.current = self.peak = 0

    def add(self, amount: int) -> None:
        self.current += amount
        self.peak = max(self.peak, self.current)


class ReferenceAllocator:
    """One device's allocator; ``events`` is what it recorded, once ``record`` is on."""

    def __init__(
        self,
        expandable: bool = False,
        max_split: int | None = None,
        divisions: int = 0,
        max_entries: int | None = None,
        plain_private_pools: bool = False,
        notes_pools: bool = False,
    ) -> None:
        """``plain_private_pools``: as torch up to 2.4, which gives private pools no expandable segments.

        ``notes_pools``: as torch from 2.13 on, which writes the pool of a segment into its events.
        A program may change ``expandable`` and ``max_split`` at any time.
        """
        self.plain_private_pools, self.notes_pools = plain_private_pools, notes_pools
        self.expandable, self.max_split, self.divisions, self.max_entries = (
            expandable,
            max_split,
            divisions,
            max_entries,
        )
        self.regions: list[Region] = []
        self.events: list[dict[str, Any]] = []
        self.recording = False
        self.clock = 1_000_000
        self.allocated, self.requested, self.reserved = Stat(), Stat(), Stat()
        self.at_event: list[tuple[int, int, int]] = []
        self.free_addresses: list[tuple[int, int]] = [(2**40, 2**50)]
        self.next_reservation = 2**51

    # -- what a program does ------------------------------------------------------------------------------------

    def record(self) -> None:
        self.recording = True
        self.at_event = [self._figures()]

    def malloc(self, requested: int, stream: int = 0, pool: tuple[int, int] = (0, 0)) -> Block:
        want = self.round(requested)
        block = self._find(want, stream, pool) or self._reserve(want, stream, pool)
        rest = block.size - want
        if rest and self._splits(block, want, rest):
            blocks = block.region.blocks
            blocks.insert(blocks.index(block) + 1, Block(block.address + want, rest, block.region))
            block.size = want
        block.state, block.requested = "active_allocated", requested
        self.allocated.add(block.size)
        self.requested.add(requested)
        self._note("alloc", block.address, requested, stream)
        return block

    def free(self, block: Block, is_used_elsewhere: bool = False) -> None:
        self.allocated.add(-block.size)
        block.state = "active_pending_free"
        self._note("free_requested", block.address, block.requested, block.region.stream)
        if not is_used_elsewhere:
            self.complete(block)

    def complete(self, block: Block) -> None:
        self.requested.add(-block.requested)
        self._note("free_completed", block.address, block.requested, block.region.stream)
        block.state = "inactive"
        self._merge(block)

    def empty_cache(self) -> None:
        for region in list(self.regions):
            if region.is_expandable:
                for block in [b for b in region.blocks if b.state == "inactive"]:
                    self._unmap(block)
            elif len(region.blocks) == 1 and region.blocks[0].state == "inactive":
                self._release(region)

    def collect(self) -> None:
        """Release one unsplit, cached segment of the large pool, as garbage collection does."""
        for region in self.regions:
            is_cached = len(region.blocks) == 1 and region.blocks[0].state == "inactive"
            if is_cached and not region.is_expandable and not region.is_small:
                self._release(region)
                return

    def run_out(self, wanted: int, device_free: int) -> None:
        """Note that a request failed."""
        self.clock += 1
        failure = {"action": "oom", "device_free": device_free, "size": wanted, "stream": 0, "time_us": self.clock}
        self.events.append(failure)

    # -- how ----------------------------------------------------------------------------------------------------

    def round(self, size: int) -> int:
        if size < 512:
            return 512
        if self.divisions > 1 and size > 512 * self.divisions:
            power = 1
            while power * 2 <= size:
                power *= 2
            if power == size:
                return size
            step = power // self.divisions
            return power + -(-(size - power) // step) * step
        return -(-size // 512) * 512

    def _splits(self, block: Block, want: int, rest: int) -> bool:
        if block.region.is_small or self.expandable:
            return rest >= 512
        return (self.max_split is None or want < self.max_split) and rest > MIB

    def _find(self, want: int, stream: int, pool: tuple[int, int]) -> Block | None:
        candidates = [
            block
            for region in self.regions
            if (region.stream, region.pool, region.is_small) == (stream, pool, want <= MIB)
            # blocks of expandable segments serve nothing while these are switched off
            and (self.expandable or not region.is_expandable)
            for block in region.blocks
            if block.state == "inactive" and block.size >= want
        ]
        ordered = sorted(candidates, key=lambda block: (block.size, block.address))
        best = ordered[0] if ordered else None
        for block in ordered[1:]:
            # a block that could grow counts as large as it could get
            if best is None or not best.region.is_expandable or self._grown(block) >= self._grown(best):
                break
            best = block
        if best is None or self.max_split is None:
            return best
        is_too_large = want < self.max_split <= best.size or (want >= self.max_split and best.size >= want + LARGE_PAGE)
        return None if is_too_large else best

    @staticmethod
    def _grown(block: Block) -> int:
        blocks = block.region.blocks
        following = blocks[blocks.index(block) + 1 :][:1]
        return block.size + sum(one.size for one in following if one.state == "unmapped")

    def _reserve(self, want: int, stream: int, pool: tuple[int, int]) -> Block:
        if self.expandable and not (self.plain_private_pools and pool != (0, 0)):
            return self._expand(want, stream, pool)
        size = SMALL_PAGE if want <= MIB else LARGE_PAGE if want < 10 * MIB else -(-want // (2 * MIB)) * 2 * MIB
        for index, (begin, end) in enumerate(self.free_addresses):
            if end - begin >= size:
                self.free_addresses[index] = (begin + size, end)
                break
        region = Region(stream, pool, want <= MIB, False)
        region.blocks.append(Block(begin, size, region))
        self.regions.append(region)
        self.reserved.add(size)
        self._note("segment_alloc", begin, size, stream, pool)
        return region.blocks[0]

    def _release(self, region: Region) -> None:
        block = region.blocks[0]
        self.regions.remove(region)
        self.free_addresses = sorted([*self.free_addresses, (block.address, block.address + block.size)])
        self.reserved.add(-block.size)
        self._note("segment_free", block.address, block.size, region.stream, region.pool)

    def _expand(self, want: int, stream: int, pool: tuple[int, int]) -> Block:
        wanted = (stream, pool, want <= MIB, True)
        regions = [r for r in self.regions if (r.stream, r.pool, r.is_small, r.is_expandable) == wanted]
        if not regions:
            region = Region(stream, pool, want <= MIB, True)
            region.blocks.append(Block(self.next_reservation, RESERVATION, region, "unmapped"))
            self.next_reservation += RESERVATION
            self.regions.append(region)
            regions = [region]
        blocks = regions[0].blocks
        for index, block in enumerate(blocks):
            if block.state != "unmapped":
                continue
            at = index - 1 if index and blocks[index - 1].state == "inactive" else index
            room, last = 0, at
            while last < len(blocks) and blocks[last].state in {"inactive", "unmapped"} and room < want:
                room += blocks[last].size
                last += 1
            if room >= want:
                break
        found = blocks[at]
        if found.state == "unmapped":
            found = self._map(found, min(found.size, want))
        while found.size < want:
            following = blocks[blocks.index(found) + 1]
            found = self._map(following, min(want - found.size, following.size))
        return found

    def _map(self, block: Block, size: int) -> Block:
        page = SMALL_PAGE if block.region.is_small else LARGE_PAGE
        size = min(-(-size // page) * page, block.size)
        blocks = block.region.blocks
        if size < block.size:
            blocks.insert(
                blocks.index(block) + 1, Block(block.address + size, block.size - size, block.region, "unmapped")
            )
            block.size = size
        block.state = "inactive"
        address = block.address
        merged = self._merge(block)
        self.reserved.add(size)
        self._note("segment_map", address, size, block.region.stream, block.region.pool)
        return merged

    def _unmap(self, block: Block) -> None:
        page = SMALL_PAGE if block.region.is_small else LARGE_PAGE
        base = block.region.blocks[0].address
        begin = base - (base - block.address) // page * page
        end = base + (block.address + block.size - base) // page * page
        if begin >= end:
            return
        blocks = block.region.blocks
        at = blocks.index(block)
        parts = [
            Block(low, high - low, block.region, state)
            for low, high, state in (
                (block.address, begin, "inactive"),
                (begin, end, "unmapped"),
                (end, block.address + block.size, "inactive"),
            )
            if high > low
        ]
        blocks[at : at + 1] = parts
        self._merge(next(part for part in parts if part.state == "unmapped"))
        if len(blocks) == 1:
            self.regions.remove(block.region)  # the next one begins elsewhere
        self.reserved.add(begin - end)
        self._note("segment_unmap", begin, end - begin, block.region.stream, block.region.pool)

    def _merge(self, block: Block) -> Block:
        blocks = block.region.blocks
        at = blocks.index(block)
        if at + 1 < len(blocks) and blocks[at + 1].state == block.state:
            block.size += blocks.pop(at + 1).size
        if at and blocks[at - 1].state == block.state:
            block.address = blocks[at - 1].address
            block.size += blocks.pop(at - 1).size
        return block

    # -- what is left of it -------------------------------------------------------------------------------------

    def _figures(self) -> tuple[int, int, int]:
        return self.allocated.current, self.requested.current, self.reserved.current

    def _note(self, action: str, address: int, size: int, stream: int, pool: tuple[int, int] | None = None) -> None:
        self.clock += 7
        if not self.recording:
            return
        event = {"action": action, "addr": address, "size": size, "stream": stream, "time_us": self.clock, "frames": []}
        if self.notes_pools and pool is not None:
            event["pool_id"] = pool
        self.events.append(event)
        self.at_event.append(self._figures())
        if self.max_entries is not None and len(self.events) > self.max_entries:
            del self.events[0], self.at_event[0]

    def peaks(self) -> tuple[int, int, int]:
        """Return the peaks of allocated, requested and reserved bytes over the recorded window."""
        allocated, requested, reserved = zip(*self.at_event, strict=True)
        return max(allocated), max(requested), max(reserved)

    def snapshot(self) -> dict[str, Any]:
        settings = {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": -1 if self.max_split is None else self.max_split,
            "garbage_collection_threshold": 0.0,
            "expandable_segments": self.expandable,
            "roundup_power2_divisions": {str(2**power): self.divisions for power in range(16)},
        }
        segments = [self._segment(region, run) for region in self.regions for run in _mapped_runs(region.blocks)]
        return {"segments": segments, "device_traces": [self.events], "allocator_settings": settings}

    @staticmethod
    def _segment(region: Region, blocks: list[Block]) -> dict[str, Any]:
        return {
            "device": 0,
            "address": blocks[0].address,
            "total_size": sum(block.size for block in blocks),
            "stream": region.stream,
            "segment_type": "small" if region.is_small else "large",
            "segment_pool_id": region.pool,
            "is_expandable": region.is_expandable,
            "frames": [],
            "blocks": [
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested,
                    "state": block.state,
                    "frames": [],
                }
                for block in blocks
            ],
        }


def recording(**how: Any) -> ReferenceAllocator:
    """Return an allocator that is recorded from the first."""
    allocator = ReferenceAllocator(**how)
    allocator.record()
    return allocator


def _mapped_runs(blocks: list[Block]) -> list[list[Block]]:
    runs: list[list[Block]] = [[]]
    for block in blocks:
        if block.state == "unmapped":
            runs.append([])
        else:
            runs[-1].append(block)
    return [run for run in runs if run]
