"""Write the table of licences in `docs/reference/dependencies.md` from the installed packages.

python scripts/dependencies.py    # in the environment that `make` builds
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, PINS = ROOT / "docs" / "reference" / "dependencies.md", ROOT / "constraints.txt"
MARK = "<!-- licences -->\n"


def pins(text: str) -> dict[str, str]:
    """The version of each package in the text of a constraints or lock file."""
    lines = (line.split(" ")[0] for line in text.splitlines() if line[:1].isalnum())
    return dict(line.split("==", 1) for line in lines)


def licence(package: str) -> str:
    """The licence in a package's metadata: SPDX expression, else classifiers, else a short text."""
    about = metadata.metadata(package)

    def stated(key: str) -> list[str]:
        return about.get_all(key) or []

    kinds = [c.rsplit(" :: ", 1)[-1] for c in stated("Classifier") if c.startswith("License :: ")]
    texts = [text for text in stated("License") if "\n" not in text]
    for found in (stated("License-Expression"), kinds, texts):
        if found:
            return ", ".join(sorted(found))
    raise SystemExit(f"{package} names no licence in its metadata")


def table() -> str:
    """The table of licences of all pinned packages."""
    rows = [
        f"| {name} | {version} | {licence(name)} |"
        for name, version in pins(PINS.read_text()).items()
    ]
    return "\n".join(["| package | version | licence |", "|---|---|---|", *rows]) + "\n"


def main() -> None:
    """Write the page."""
    head, mark, _ = PAGE.read_text().partition(MARK)
    if not mark:
        sys.exit(f"{PAGE} has no line {MARK.strip()}")
    PAGE.write_text(f"{head}{MARK}\n{table()}")


if __name__ == "__main__":
    main()
