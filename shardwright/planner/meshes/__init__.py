"""Searches device meshes and numbers of micro-batches, one after the other."""
