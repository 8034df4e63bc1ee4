"""Scripts that train by another trainer, with a plan on ranks or without one on one device."""
