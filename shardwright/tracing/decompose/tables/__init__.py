"""Decompositions of torch's operators, one family of operators a file."""
