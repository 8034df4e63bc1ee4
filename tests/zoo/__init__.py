"""The models that coverage is measured on: one factory each, reduced and as published.

`ZOO[name](published)` gives a model in training mode and a batch of keyword arguments; the
model returns its loss. Build the published ones under `torch.device("meta")`.
"""

from tests.zoo.images.convolutional import CONVOLUTIONAL
from tests.zoo.images.pytorchcv_models import PYTORCHCV
from tests.zoo.images.transformers import TRANSFORMERS
from tests.zoo.images.with_text import WITH_TEXT
from tests.zoo.language.decoders import DECODERS
from tests.zoo.language.encoder_decoders import ENCODER_DECODERS
from tests.zoo.language.encoders import ENCODERS
from tests.zoo.language.mixtures import MIXTURES
from tests.zoo.language.state_space import STATE_SPACE
from tests.zoo.plain import PLAIN
from tests.zoo.sound import SOUND

FAMILIES = {
    "Decoders": DECODERS,
    "Mixtures of experts": MIXTURES,
    "State spaces and linear attention": STATE_SPACE,
    "Encoders": ENCODERS,
    "Encoders and decoders": ENCODER_DECODERS,
    "Vision transformers": TRANSFORMERS,
    "Images and text": WITH_TEXT,
    "Sound": SOUND,
    "Convolutions": {**CONVOLUTIONAL, **PYTORCHCV},
    "Plain modules": PLAIN,
}
ZOO = {name: build for family in FAMILIES.values() for name, build in family.items()}
HUGGING_FACE = frozenset(ZOO) - {*PYTORCHCV, *PLAIN}  # names of models of transformers
