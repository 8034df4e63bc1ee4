"""Pipeline schedules: one value each, and the registry of them."""
