"""Builds the search problem of one mesh: the choices of every operator and parameter."""
