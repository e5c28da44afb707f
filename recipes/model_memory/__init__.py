"""What memory_questions does: its cells, how one is recorded and read, what is said about all of them."""
