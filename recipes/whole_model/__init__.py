"""What end_to_end does: its cells, how one is measured, what is said about all of them."""
