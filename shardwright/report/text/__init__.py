"""A plan as text for people: its modules, costs and notes."""
