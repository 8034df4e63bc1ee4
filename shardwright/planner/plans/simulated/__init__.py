"""Finds time and memory of plans by simulating their step programs."""
