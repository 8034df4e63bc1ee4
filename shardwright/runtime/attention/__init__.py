"""Attention that is shared by several devices."""
