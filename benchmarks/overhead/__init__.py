"""One rank costs nothing: the lowered program on one device against the plain module."""
