"""Predictions scored against measurements that others have published.

`readers` turn snapshots of public repositories into the rows of `rows/*.csv`; `setups` and `graphs`
turn a row into machine, strategy and graph; `run` prices every row, `score` compares, `page` and
`plots` write docs/published.md: `python -m benchmarks.published`.
"""
