"""What tilings cost on a machine: seconds and bytes, as tables for the search to add up.

Knows graphs, rules and machines; never runs an operator and never imports torch.
"""
