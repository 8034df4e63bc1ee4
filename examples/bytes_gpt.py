"""A small GPT-2, as Hugging Face ships it, learns to write Python from the standard library.

$ shardwright run examples/bytes_gpt.py:job --devices 2

Nothing here knows of devices: the model is unmodified, and the batches are those
that one device would train on. A token is a byte of source code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import shardwright as sw

BATCH, LENGTH = 8, 128


def model() -> GPT2LMHeadModel:
    """GPT-2 in small: 3.3 million parameters, dropout and tied embeddings included."""
    config = GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_layer=4,
        n_embd=256,
        n_head=8,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def source_code() -> torch.Tensor:
    """The modules of Python's standard library, one after the other, as bytes."""
    library = Path(os.__file__).parent
    text = b"".join(file.read_bytes() for file in sorted(library.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def data() -> Iterator[dict[str, torch.Tensor]]:
    """Batches of random windows of the source code, for ever; the same ones on every rank."""
    code = source_code()
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(code) - LENGTH, (BATCH, 1), generator=generator)
        windows = code[starts + torch.arange(LENGTH)].long()  # (BATCH, LENGTH)
        yield {"input_ids": windows, "labels": windows}


def job() -> sw.Job:
    """What `shardwright` plans, trains and verifies."""
    return sw.Job(
        name="bytes-gpt",
        model=model,
        batch=lambda: next(data()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
        data=data,
        steps=200,
    )
