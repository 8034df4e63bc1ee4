"""Frontiers of (time, memory) and (min, +) algebra."""
