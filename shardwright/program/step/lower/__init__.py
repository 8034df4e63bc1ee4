"""Lowering of a plan to the naive step program of each rank."""
