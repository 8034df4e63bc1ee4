"""Decompositions of torch's operators, one family of operators in each file."""
