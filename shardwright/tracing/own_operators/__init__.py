"""Operators of the package in traces: one call for what would else be many."""
