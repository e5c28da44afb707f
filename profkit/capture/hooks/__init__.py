"""Ranges of an unedited script: what is hooked or patched, and what is open on each thread."""
