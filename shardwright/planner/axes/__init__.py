"""Mesh axes and their roles."""
