"""Uniform strategies: expanded to tilings and storage, priced as any plan, enumerated."""
