"""Edits of a program, made in its process while it runs, each with the proof that it took effect."""
