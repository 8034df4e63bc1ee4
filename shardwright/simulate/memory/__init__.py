"""Simulates the memory of one rank over a step."""
