"""Training configs of other frameworks: read as a `Strategy`, written from one, edited in place."""
