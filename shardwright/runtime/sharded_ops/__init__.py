"""Operators that several devices compute together."""
