"""Recomputed segments of a program: what they hold, keep and run in which order."""
