"""Cost tables of redistributions and collectives."""
