"""The report: one HTML page of a run, readable without a network and without JavaScript."""
