"""Traces a repeated block once and copies its trace for the other calls."""
