"""Runs: their options, what they print, and what `run --json` wrote read again."""
