"""Mixtures of experts: routers that limit groups, and experts that compute every token."""
