"""Looks for constraints that make a search better: models of the zoo, random constraints.

python scripts/campaign_constraints.py --seconds 600                # small models, from seed 0 on
python scripts/campaign_constraints.py --models llama vit --published --machines 8xH100 4x8xA100

Compares optima of the tables on one mesh, and in a part of the cases the plans that are chosen
within a limit, with meshes, caps and stages. Prints each case with its seed, and how many were
compared. Exits with 1 where there was one.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from functools import cache
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import shardwright as sw
from shardwright.ir.options.constraints import ConstraintError
from shardwright.planner.meshes.meshes import meshes_of
from tests.harness.random_constraints import ROUNDING, Subject
from tests.zoo import ZOO


def main() -> int:
    """Try seeds in order until the time is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["gpt2", "mixtral", "resnet", "vit"])
    parser.add_argument("--machines", nargs="*", default=["8xH100", "4xV100"])
    parser.add_argument("--published", action="store_true", help="models at their published sizes")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument(
        "--answers", type=float, default=0.3, help="part of cases that compare chosen plans"
    )
    parser.add_argument("--seed", type=int, default=0, help="the first that is tried")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)

    @cache
    def subject(name: str) -> Subject:
        with torch.device("meta" if given.published else "cpu"):
            module, batch = ZOO[name](given.published)
        return Subject(sw.capture(module, (), batch))

    end, seed, compared, failed = time.monotonic() + given.seconds, given.seed, 0, 0
    while time.monotonic() < end:
        random = Random(seed)
        name, machine = (
            random.choice(given.models),
            sw.Machine.preset(random.choice(given.machines)),
        )
        where: object = ""
        if random.random() < given.answers:
            texts, where = subject(name).question(random, machine)
            gain = subject(name).excess(machine, texts, where)
        else:
            where = random.choice(list(meshes_of(machine.devices)))
            texts = subject(name).constraints(random)
            try:
                gain = subject(name).gain(machine, where, texts)
            except ConstraintError:
                gain = None
        if gain is not None:
            compared += 1
            if gain > ROUNDING:
                failed += 1
                print(
                    f"seed {seed}: {name}, {machine.name}, {where}: {gain:.3%} {texts}", flush=True
                )
        seed += 1
    print(f"{compared} of {seed - given.seed} compared, {failed} better under constraints")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
