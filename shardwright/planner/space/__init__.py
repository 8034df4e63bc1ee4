"""The search problem of one mesh: what every operator and parameter may do."""
