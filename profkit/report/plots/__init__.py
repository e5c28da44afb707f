"""Pictures in PNG files."""
