"""Rewrites operators of an exported program so that splitting them is exact."""
