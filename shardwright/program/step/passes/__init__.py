"""Passes over step programs, one a file: equal values, less time."""
