"""Coordinates the ranks of a run: rendezvous, consensus before each step, and a watchdog."""
