"""Detectors of mistakes that a table of measurements reveals: `inspect` runs them on files or on a recipe's rows."""
