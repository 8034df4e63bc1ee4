"""Renders a plan as text for people: modules, costs and notes."""
