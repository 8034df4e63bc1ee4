"""Simulates the time of one step on streams and links."""
