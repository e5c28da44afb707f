"""Who held the memory: the allocator replayed, its peak taken apart, compared, and what a dump of a failure tells."""
