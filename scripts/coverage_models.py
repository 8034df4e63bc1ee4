"""Capture, plan and verify every model of the zoo, and write `docs/models.md`.

python scripts/coverage_models.py                      # every model: minutes on two cores
python scripts/coverage_models.py --check              # as CI does: the page must say the same
python scripts/coverage_models.py --only vit bert      # these rows anew, the others as they are
python scripts/coverage_models.py --planned            # but for the errors, which stay as they are
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.zoo import ZOO  # noqa: E402
from tests.zoo.page import HEADINGS, TILINGS, Row, read, stale, write  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
SLOWEST = (
    *("granite hybrid", "zamba2", "bamba", "falcon h1", "prophetnet", "deepseek v2"),
    *(
        "qwen2.5 vl",
        "llava",
        "nemotron h",
        "t5",
        "gpt-oss",
        "qwen3 moe",
        "mixtral",
        "densenet121",
        "inceptionv4",
    ),
)


def main() -> int:
    """Measure the chosen models; status 1 if one is not covered, or the page was stale."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(ZOO), default=list(ZOO), metavar="NAME")
    parser.add_argument("--check", action="store_true", help="compare with the page, do not write")
    parser.add_argument("--planned", action="store_true", help="plan only, start no ranks")
    parser.add_argument("--tilings", type=int, default=TILINGS, help="random ones on each mesh")
    parser.add_argument("--part", default="1/1", help="1/3: every third model alone")
    parser.add_argument("--workers", type=int, default=2, help="processes that plan")
    options = parser.parse_args()
    quiet()
    start = time.perf_counter()
    first, parts = map(int, options.part.split("/"))
    names = options.only[first - 1 :: parts]
    plans = planned(names, options.workers)
    say(f"planned {len(plans)} models in {time.perf_counter() - start:.0f} s")
    before = read(PAGE)
    rows = {n: Row.replanned(n, plans[n], before.get(n, ())) for n in names}
    if not options.planned:
        start = time.perf_counter()
        errors = verified(names, options.tilings)
        say(f"verified {len(errors)} models in {time.perf_counter() - start:.0f} s")
        rows |= {name: Row.of(name, plans[name], errors[name]) for name in errors}
    for row in rows.values():
        print(" | ".join(row.cells))
    failed = [f"{name}: {row.trouble}" for name, row in rows.items() if row.trouble]
    if options.check:
        failed += [f"{PAGE.name} is stale: {line}" for line in stale(before, rows)]
    else:
        cells = {**before, **{name: row.cells for name, row in rows.items()}}
        write(PAGE, {name: cells[name] for name in ZOO if name in cells})
    for line in failed:
        say(line)
    if options.check and failed:
        say(f"columns that must agree: {', '.join(h.name for h in HEADINGS if h.checked)};"
            " `make models` writes the page anew")  # fmt: skip
    return bool(failed)


def planned(names: Sequence[str], workers: int) -> dict[str, object]:
    """What `published` says of each model, or the text of its error; the slowest start first."""
    order = sorted(names, key=lambda n: SLOWEST.index(n) if n in SLOWEST else len(SLOWEST))
    context = multiprocessing.get_context("spawn")
    found: dict[str, object] = {}
    with ProcessPoolExecutor(workers, mp_context=context, initializer=quiet) as pool:
        running = {pool.submit(_published, name): name for name in order}
        for done in as_completed(running):
            name = running[done]
            try:
                found[name] = done.result()
            except Exception as e:  # one model's trouble is a row of the table, not its end
                found[name] = f"{type(e).__name__}: {e}"
            say(f"{name} planned")
    return found


def _published(name: str) -> object:
    import torch

    from tests.zoo.published import published

    torch.set_num_threads(1)
    return published(name)


def verified(names: Sequence[str], count: int) -> dict[str, object]:
    """Errors on 2 and on 2x2 ranks, or the text of an error, by model."""
    from tests.harness.ranks import run_ranks
    from tests.zoo.assignments import WORLD, merged

    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(WORLD, _verify, list(names), count, folder, timeout=3600)
        return dict(merged(found))


def _verify(names: list[str], count: int, folder: str) -> dict[str, object]:
    from tests.zoo.assignments import verify

    quiet()
    return dict(verify(names, count, folder, progress=True))


def say(text: str) -> None:
    """Progress and trouble, beside the rows."""
    print(text, file=sys.stderr, flush=True)


def quiet() -> None:
    """No warnings of the libraries that models come from."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
