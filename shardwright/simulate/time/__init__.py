"""Simulates the time of one training step on streams and links."""
