"""Models in plain PyTorch, as people write them themselves."""

from tests.zoo.plain.generative import GENERATIVE
from tests.zoo.plain.graphs_and_tables import GRAPHS_AND_TABLES
from tests.zoo.plain.networks import NETWORKS

PLAIN = {**NETWORKS, **GENERATIVE, **GRAPHS_AND_TABLES}
