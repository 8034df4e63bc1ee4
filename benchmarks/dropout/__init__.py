"""What dropout whose masks depend on position costs."""
