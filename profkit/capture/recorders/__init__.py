"""What records the steps of a process."""
