"""Rewrites captured graphs: same results, by operators that split better."""
