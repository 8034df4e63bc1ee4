"""Finds what autograd does in a traced call, and gradient changes that a trace does not show."""
