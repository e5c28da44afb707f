"""What each command prints: a document built from the result of an analysis."""
