"""Attention that several devices compute together: ring attention and zigzag layout."""
