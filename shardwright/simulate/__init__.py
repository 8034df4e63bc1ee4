"""Predicts the seconds and bytes of a lowered step."""
