"""The picture of one layer of a plan."""
