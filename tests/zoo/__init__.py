"""The models that coverage is measured on: one factory each, reduced and as published.

`ZOO[name](published)` gives a model in training mode and a batch of keyword arguments; the
model returns its loss. Build the published ones under `torch.device("meta")`.
"""

from tests.zoo.convolutional import CONVOLUTIONAL
from tests.zoo.huggingface import HUGGING_FACE
from tests.zoo.plain import PLAIN

ZOO = {**HUGGING_FACE, **CONVOLUTIONAL, **PLAIN}
