"""Check PyTorch's own database of operators and modules, and write `docs/operators.md`.

python scripts/coverage_operators.py                 # every entry: half an hour on two cores
python scripts/coverage_operators.py --only add mm   # these entries anew, the others as they are
python scripts/coverage_operators.py --resume        # those of an interrupted run that are missing

Findings are kept in `docs/operators.json`, one line each.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from shardwright.rules.analysis import NO_ELEMENTS  # noqa: E402
from tests.harness.ranks import run_ranks  # noqa: E402
from tests.sweep.entries import entries  # noqa: E402
from tests.sweep.sweep import Finding, check_all  # noqa: E402

PAGE, FINDINGS = ROOT / "docs" / "operators.md", ROOT / "docs" / "operators.json"
VERDICTS = ("exact", "whole", "refused", "wrong", "crash")
_CHUNK, _SECONDS = 25, 900  # entries that one pair of ranks checks, and how long it may take


def main() -> int:
    """Check the chosen entries; status 1 if one is wrong or crashes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these entries")
    parser.add_argument("--resume", action="store_true", help="entries without a finding")
    parser.add_argument("--page", action="store_true", help="only write the page of what is found")
    options = parser.parse_args()
    names = [entry.name for entry in entries()]
    found = read() if options.only or options.resume else {}
    chosen = options.only or [name for name in names if name not in found]
    if options.page:
        found, chosen = read(), []
    if unknown := set(chosen) - set(names):
        parser.error(f"no entry is called {', '.join(sorted(unknown))}")
    FINDINGS.write_text("".join(json.dumps(f) + "\n" for n, f in found.items() if n not in chosen))
    start = time.perf_counter()
    check(chosen)
    print(f"{len(chosen)} entries in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    found = {name: f for name, f in sorted(read().items()) if name in names}
    FINDINGS.write_text("".join(json.dumps(f) + "\n" for f in found.values()))
    PAGE.write_text(page(found))
    bad = [f"{name}: {f['texts'][0]}" for name, f in found.items() if f["verdict"] in VERDICTS[3:]]
    print("\n".join(bad), file=sys.stderr)
    return 1 if bad else 0


def check(names: list[str]) -> None:
    """Check the entries on pairs of ranks; an entry that ends its ranks is a crash."""
    left, commit = list(names), _commit()
    while left:
        chunk, left = left[:_CHUNK], left[_CHUNK:]
        print(f"{len(names) - len(left) - len(chunk)} of {len(names)}", file=sys.stderr)
        try:
            run_ranks(2, check_all, chunk, str(FINDINGS), commit, timeout=_SECONDS)
        except Exception as e:
            known = read()
            missing = [name for name in chunk if name not in known]
            if not missing:
                raise
            text = f"ended its ranks: {str(e).strip().splitlines()[-1][:200]}"
            broken = Finding(missing[0], "crash", texts=[text], commit=commit)
            with FINDINGS.open("a") as file:
                file.write(json.dumps(asdict(broken)) + "\n")
            left = missing[1:] + left


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def read() -> dict[str, dict[str, Any]]:
    """Findings by the name of their entry."""
    if not FINDINGS.exists():
        return {}
    return {(f := json.loads(line))["name"]: f for line in FINDINGS.read_text().splitlines()}


def page(found: dict[str, dict[str, Any]]) -> str:
    """The page of figures."""
    counts = Counter(f["verdict"] for f in found.values())
    samples, splits = (sum(f[key] for f in found.values()) for key in ("samples", "assignments"))
    commits = Counter(f["commit"] for f in found.values())
    lines = [
        "# Operators",
        "",
        "PyTorch keeps a database of its operators and modules, with samples, to test itself. Each",
        "entry is made a small model here: its tensors are multiplied by parameters, and the loss",
        "gives each element of its results a weight of its own. The model is captured and compared",
        "with itself run eagerly; then every factor of every operator of its graph is split over",
        "two ranks in turn, uneven sizes included: loss, every gradient and every buffer, in",
        "float64. Splits that a former entry has shown are not run again, and partial sums are not",
        "passed on where numbers are infinite: infinity times another rank's zero is no number.",
        "",
        f"{len(found)} of {len(entries())} entries, {samples} samples, {splits} splits, with torch"
        f" {torch.__version__}",
        f"on Python {platform.python_version()} (`python scripts/coverage_operators.py`):",
        ", ".join(f"{count} at commit {commit}" for commit, count in commits.most_common()) + ".",
        "",
        "| verdict | entries | meaning |",
        "| --- | --- | --- |",
    ]
    meanings = (
        "equals the module, under every split",
        "equals the module; every device computes all of it",
        "cannot be captured, and one line says why",
        "computes something else",
        "ends with an error of ours",
    )
    lines += [
        f"| {verdict} | {counts[verdict]} | {meaning} |"
        for verdict, meaning in zip(VERDICTS, meanings, strict=True)
    ]
    whole = [pair for f in found.values() for pair in f["whole"].items()]
    reasons = Counter((op, why) for op, why in whole if why != NO_ELEMENTS)
    lines += [
        "",
        "## Operators computed whole",
        "",
        "Some calls of these operators, among others that are split, have no dimension that can",
        "be: every device computes all of them. `explain` gives the same reasons. Calls on tensors",
        "without elements are left out.",
        "",
        "| operator | entries | reason |",
        "| --- | --- | --- |",
    ]
    lines += [f"| `{op}` | {count} | {why} |" for (op, why), count in sorted(reasons.items())]
    for verdict, title in (("whole", "Entries computed whole"), ("refused", "Refused"),
                           ("wrong", "Wrong"), ("crash", "Crashes")):  # fmt: skip
        rows = [f for f in found.values() if f["verdict"] == verdict]
        if rows:
            lines += ["", f"## {title}", "", "| entry | reason |", "| --- | --- |"]
            lines += [f"| `{f['name']}` | {_reason(f)} |" for f in rows]
    return "\n".join(lines) + "\n"


def _reason(finding: dict[str, Any]) -> str:
    if finding["verdict"] == "whole":
        whole = [f"`{name}`: {why}" for name, why in finding["whole"].items()]
        return "; ".join(whole) or "it has no dimensions"
    first = str(finding["texts"][0])
    text = first.partition("): ")[2] or first
    return text.replace("|", "\\|")[:240]


if __name__ == "__main__":
    sys.exit(main())
