"""Assignments between the supported points of the frontier."""
