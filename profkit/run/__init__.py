"""The run directory: where its files lie, and one typed reader and writer for each. Here the two wings meet."""
