"""Adaptation to resources: one model on 1 to 4 ranks under falling memory limits, enforced."""
