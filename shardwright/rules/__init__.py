"""What operators mean for tilings: index notation, and dimensions unified over the graph.

Knows shapes and argument lists; never runs an operator and never imports torch.
"""
