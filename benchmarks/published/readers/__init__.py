"""Readers: each turns a snapshot of one public repository into rows.

    python -m benchmarks.published.readers SOURCE GIT_DIRECTORY

A reader takes figures and nothing else. What it cannot use becomes a row with the reason.
"""
