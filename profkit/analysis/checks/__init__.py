"""Whether a capture can be trusted."""
