"""Derives rules of operators that have none by running them on tiles."""
