"""Supported points of the frontier, lower bounds and certificates."""
