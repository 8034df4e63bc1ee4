"""Turns points of a search into plans, and keeps those that a choice is made from."""
