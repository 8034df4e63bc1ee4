"""Rewrites operators of an exported program or a graph so that splitting them is exact."""
