"""Attention that several devices compute together: ring attention."""
