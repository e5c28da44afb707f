"""A capture as a file for a timeline viewer."""
