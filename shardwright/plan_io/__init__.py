"""Plans as JSON files, checked when they are read."""
