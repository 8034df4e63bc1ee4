"""Compares two plans."""
