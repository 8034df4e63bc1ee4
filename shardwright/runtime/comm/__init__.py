"""Collectives and point-to-point messages between ranks."""
