"""Lowers a graph and a plan to the program of one rank."""
