"""Simulates the memory of a whole step: its program, transfers, messages and update."""
