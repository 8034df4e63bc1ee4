"""Predictions scored against measurements that others have published.

`readers` turn snapshots of public repositories into the rows of `rows/*.csv`; `run` prices every
row, `score` compares, `page` writes what docs/published.md shows.
"""
