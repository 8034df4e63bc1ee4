"""Finds what autograd does in a traced call, and what changes gradients unseen."""
