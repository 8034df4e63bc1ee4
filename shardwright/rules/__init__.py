"""Rules of operators in index notation, and unification of dimensions over a graph.

Works on shapes and arguments: never runs an operator and never imports torch.
"""
