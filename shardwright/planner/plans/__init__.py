"""Turns points of a search into plans and refines their memory."""
