"""Expands uniform strategies to tilings and storage, prices them as plans, and enumerates them."""
