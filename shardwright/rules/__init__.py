"""Rules of operators in index notation, and unification of dimensions over a graph.

Rules depend only on shapes and arguments: no operator is run and torch is not imported.
"""
