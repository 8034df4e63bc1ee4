"""The campaigns against broken input, broken disks and broken code, as `docs/campaigns.md`.

python scripts/campaigns_page.py

The figures are those of the committed results, each of which a command wrote; a test compares.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "campaigns.md"
Result = Mapping[str, Any]

_HEAD = (
    "# Campaigns\n\n"
    "Long searches for what is wrong, each a command that can be repeated with another seed. The"
    " test suite runs a small part of each. *Found* counts what the run of the table found,"
    " *mended* what of it is found by tests, or gone, since then, and *left* what is neither mended"
    " nor explained.\n"
)
_MENDED = (
    "## Mended before\n\n"
    "What earlier runs found is in `CHANGELOG.md`, under *Trust*. Among it are fields of a"
    " `config.json` that were called as methods, plan files whose parts do not belong together, a"
    " name in a plan that became code of an export, a batch norm that could not be called twice,"
    " the memory of updates under Adagrad and RAdam, and six of eighteen planted faults that no"
    " test noticed.\n"
)


class Row(NamedTuple):
    """What a campaign tried and found, and how much of that is left, or mended since."""

    tried: str
    found: str
    left: int
    mended: int = 0


class Campaign(NamedTuple):
    """A result in a file of the repository, and its row of the table."""

    title: str
    file: str
    row: Callable[[Result], Row]


def _mutants(result: Result) -> Row:
    kinds = "tried", "explained", "left", "killed", "killed at first"
    rooms = result["rooms"].values()
    tried, explained, left, killed, first = (sum(r[kind] for r in rooms) for kind in kinds)
    planted = result["rooms"]["planted"]["tried"]
    what = f"{tried:,} changes of the code: {planted} made by hand, of {result['drawn']:,} drawn"
    found = f"{tried - first} that no test noticed, {explained} of them explained"
    return Row(f"{what} {tried - planted}", found, left, killed - first)


def _kills(result: Result) -> Row:
    plans = {run["plan"] for run in result["runs"]}
    broken = len(result["torn_checkpoints"]) + len(result["left_aside"])
    broken += sum(not run["same_curve"] or run["status"] != 0 for run in result["runs"])
    tried = f"{result['kills']:,} kills of a rank under {len(plans)} kinds of plan"
    return Row(tried, f"{broken} torn checkpoints or other losses", broken)


def _modules(result: Result) -> Row:
    verdicts, wrong = result["verdicts"], len(result["wrong_seeds"])
    refused = sum(count for verdict, count in verdicts.items() if verdict != "exact")
    tried = f"{sum(verdicts.values()):,} random modules on two ranks"
    return Row(tried, f"{wrong} wrong, {refused} refused in a line", wrong)


def _configs(result: Result) -> Row:
    tried = f"{result['files']:,} mutated configs of frameworks"
    return Row(tried, f"0 tracebacks: {result['read']} read, {result['refused']} refused", 0)


def _programs(result: Result) -> Row:
    seen = result["together"]
    left = len(result["unexplained"])
    harmless = seen["values live longer"] + seen["any order"]
    tried = f"{sum(seen.values()) + left:,} deleted or swapped instructions"
    found = (
        f"{seen['verify']} refused, {seen['numbers']} other numbers, {harmless} harmless by rule"
    )
    return Row(tried, found, left)


def _matrix(result: Result) -> Row:
    errors = result["errors"].values()
    tried = f"{len(errors)} strategies against one device in float64"
    return Row(tried, f"the largest error is {max(errors):.0e}", 0)


CAMPAIGNS = (
    Campaign("Mutants", "benchmarks/mutants/result.json", _mutants),
    Campaign("Kills at random moments", "benchmarks/kills/result.json", _kills),
    Campaign("Random modules", "scripts/campaign_modules.json", _modules),
    Campaign("Configs", "scripts/campaign_configs.json", _configs),
    Campaign("Step programs", "scripts/campaign_programs.json", _programs),
    Campaign("Strategies", "scripts/campaign_matrix.json", _matrix),
)


def page() -> str:
    """The page in Markdown."""
    rows, origins = [], []
    for one in CAMPAIGNS:
        result = json.loads((ROOT / one.file).read_text())
        row = one.row(result)
        rows.append([one.title, row.tried, row.found, str(row.mended), str(row.left)])
        cores, processor = result["machine"]["cores"], result["machine"]["processor"]
        origins.append(
            f"* {one.title}: `{result['command']}`, {result['date']}, {cores} cores of {processor},"
            f" torch {result['versions']['torch']}, at commit {result['commit'][:8]}: `{one.file}`."
        )
    columns = "campaign", "tried", "found", "mended", "left"
    head = ["| " + " | ".join(columns) + " |", "| --- | --- | --- | ---: | ---: |"]
    shown = "\n".join([*head, *("| " + " | ".join(row) + " |" for row in rows)])
    return "\n".join([_HEAD, shown, "", *origins, "", _MENDED])


if __name__ == "__main__":
    PAGE.write_text(page())
