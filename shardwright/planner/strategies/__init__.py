"""Expands uniform strategies to tilings and storage, and recognises them in plans."""
