"""The nouns of the house: graphs, meshes, layouts, machines and plans.

Everything here is a frozen dataclass over the standard library: it prints as
text, round-trips through JSON and knows neither torch nor any other room.
"""
