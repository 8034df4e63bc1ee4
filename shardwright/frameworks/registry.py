"""All frameworks whose configs are read, in the order in which a file is tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardwright.frameworks.documents.document import Document
from shardwright.frameworks.errors import FrameworkError
from shardwright.frameworks.readers import (
    accelerate,
    axolotl,
    deepspeed,
    llama_factory,
    megatron,
    megatron_bridge,
    torchtitan,
    torchtune,
    trainer,
)
from shardwright.frameworks.readers.understood import Given, Understood
from shardwright.frameworks.settings import Settings


@dataclass(frozen=True, slots=True)
class Framework:
    """One framework.

    Attributes:
        name: as users give it.
        recognises: whether a file is its config.
        settings: the keys of a file under the names that `read` asks for.
        read: the strategy of a file's keys.
    """

    name: str
    recognises: Callable[[Document], bool]
    settings: Callable[[Document], Settings]
    read: Callable[[Settings, Given], Understood]


FRAMEWORKS: Mapping[str, Framework] = {
    name: Framework(name, module.recognises, module.settings_of, module.read)
    for name, module in (
        ("torchtitan", torchtitan),
        ("torchtune", torchtune),
        ("accelerate", accelerate),
        ("axolotl", axolotl),
        ("megatron", megatron),
        ("megatron-bridge", megatron_bridge),
        ("llama-factory", llama_factory),
        ("deepspeed", deepspeed),
        ("trainer", trainer),
    )
}


def framework_of(document: Document, named: str | None = None) -> Framework:
    """The framework of a file; raises `FrameworkError` where none is recognised."""
    if named is not None:
        if named not in FRAMEWORKS:
            raise FrameworkError(f"the framework {named!r} is none of {', '.join(FRAMEWORKS)}")
        return FRAMEWORKS[named]
    for one in FRAMEWORKS.values():
        if one.recognises(document):
            return one
    raise FrameworkError(
        f"{document.name}: it is the config of no framework that is read ({', '.join(FRAMEWORKS)});"
        " name it with --framework if it is"
    )
