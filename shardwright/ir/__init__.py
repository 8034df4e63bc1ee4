"""Values: graphs, meshes, layouts, constraints, plans and frontiers.

Frozen dataclasses over the standard library that print as text. They import neither torch nor
any other package.
"""
