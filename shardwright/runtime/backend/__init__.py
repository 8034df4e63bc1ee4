"""Tuning of CPU ranks."""
