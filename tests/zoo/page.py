"""`docs/models.md`: a row per model, what of it must not change unseen, and what is wrong in it."""

from dataclasses import dataclass

from tests.zoo import FAMILIES, ZOO
from tests.zoo.published import KINDS, MACHINE
from tests.zoo.strategies import STRATEGIES

TOLERANCE = 1e-8  # of errors in float64
MOST_WHOLE = 0.01  # of the multiply-adds, in one operator that nothing can split
TILINGS = 3  # random ones on each mesh; odd, see `assignments.py`
LEAST_SPLIT = 0.5  # of the multiply-adds, by data parallelism
RUNS = ("plan", "random")  # kinds of errors by mesh
BY_STRATEGY = ("strategies on 4", "split by them")
VERIFIED = ("plan on 2 / 2x2", "tilings on 2 / 2x2", *BY_STRATEGY)  # columns that take ranks


@dataclass(frozen=True)
class Heading:
    """A column; `checked` if it is the same on every machine, so that CI compares it."""

    name: str
    checked: bool = True


HEADINGS = (
    Heading("model"),
    Heading("captured"),
    Heading("operators"),
    *(Heading(kind) for kind in KINDS),
    Heading("largest whole"),
    Heading(f"planned on {MACHINE}", checked=False),  # changes with search and costs
    *(Heading(name, checked=name == BY_STRATEGY[1]) for name in VERIFIED),
    Heading("capture + search", checked=False),
)
HEAD = f"""# Models

`make models` writes this page from the models of `tests/zoo`, and CI fails where a row is not
covered or says something else than the code does. At the published size, on the meta device,
nothing allocated:

* *captured*: the step of capture that did it: `plain`, or what it fell back to;
* *operators*: of the captured training step, loss included;
* *written*, *found*, *replicated*: of these operators, and then of their multiply-adds, the share
  whose rule is in the tables, was found by experiment, or is missing, so that every device
  computes them whole;
* *largest whole*: the largest share of the multiply-adds that one operator holds which nothing
  can split, for want of a rule or because its rule has no factor to split; {MOST_WHOLE:.0%} at
  most;
* *planned*: mesh, step time and memory per rank, as estimated, of the fastest plan that fits the
  devices' memory, in the precision that the model is built in;
* *capture + search*: seconds of one core of the machine that wrote the page.

At a reduced size, in float64, on 2 and on 2x2 ranks against one device:

* *plan*: the worst error of loss, gradients, buffers, and parameters after a step of an optimizer,
  under the plan that the search chooses, relative to each tensor's largest element;
* *tilings*: the same under {TILINGS} random tilings and storage layouts; at most {TOLERANCE:.0e}.
  CI tries the first of them, of a part of the models;
* *strategies*: the same on 4 ranks, with a batch of four samples, under
  {", ".join(f"`{text}`" for text in STRATEGIES)}; - for a strategy
  that has nothing to split: no weight that two ranks share evenly, or no experts;
* *split by them*: the share of the multiply-adds in operators that every axis of the strategy
  splits, so that no model passes because every rank computes everything: {LEAST_SPLIT:.0%} at
  least under the first. Tensor parallelism of these strategies splits pairs of linear layers,
  heads and classes, and leaves convolutions whole, which searched plans need not.

"""


@dataclass(frozen=True)
class Row:
    """One model's cells, and what is wrong with it, if anything."""

    cells: tuple[str, ...]
    trouble: str = ""

    @classmethod
    def of(cls, name, plan, errors):
        """The row of a `Published`, and errors by (mesh, kind); a text is an error."""
        for found, doing in ((plan, "planning"), (errors, "verifying")):
            if isinstance(found, str):
                cells = (name, f"no: {found.splitlines()[0]}", *[""] * (len(HEADINGS) - 2))
                return cls(cells, f"{doing} failed: {found}")
        worst = {kind: [e for (_, k), e in errors.items() if k == kind] for kind in RUNS}
        cells = (
            name,
            plan.step,
            str(plan.count),
            *(f"{plan.operators[kind]:.1%} / {plan.work[kind]:.1%}" for kind in KINDS),
            f"{plan.whole[0]:.2%}",
            plan.plan,
            *(" / ".join(f"{e.size:.0e}" for e in worst[kind]) for kind in RUNS),
            *(_by_strategy(errors, text) for text in ("{0.size:.0e}", "{0.split:.0%}")),
            f"{plan.capture_seconds:.1f} + {plan.search_seconds:.1f} s",
        )
        return cls(cells, _trouble(plan, errors))

    @classmethod
    def replanned(cls, name, plan, before):
        """The row of a `Published` with the errors that cells from `before` have."""
        row = cls.of(name, plan, {})
        if len(before) != len(HEADINGS):
            return cls(row.cells, row.trouble or f"{name} was not verified yet")
        pairs = zip(HEADINGS, row.cells, before, strict=True)
        cells = tuple(old if heading.name in VERIFIED else new for heading, new, old in pairs)
        return cls(cells, row.trouble)


def _by_strategy(errors, text):
    found = (errors.get((name, "strategy")) for name in STRATEGIES)
    return " / ".join("-" if e is None else text.format(e) for e in found)


def _trouble(plan, errors):
    share, op = plan.whole
    if share > MOST_WHOLE:
        return f"{op} holds {share:.1%} of the multiply-adds and cannot be split"
    for (mesh, _), error in errors.items():
        if not error.size <= TOLERANCE:
            return f"error {error.size:.1e} on {mesh} at {error.where}"
        if error.split < (LEAST_SPLIT if mesh == STRATEGIES[0] else 1e-9):
            return f"{mesh} splits {error.split:.0%} of the multiply-adds"
    return ""


def read(page):
    """Cells of an earlier run, by model."""
    lines = page.read_text().splitlines() if page.exists() else []
    cells = [
        tuple(c.strip() for c in line.split("|")[1:-1]) for line in lines if line.startswith("| ")
    ]
    return {row[0]: row for row in cells if row[0] in ZOO}


def write(page, cells):
    """The page with these rows, by family."""
    names = tuple(h.name for h in HEADINGS)
    text = HEAD
    for family, models in FAMILIES.items():
        if rows := [cells[name] for name in models if name in cells]:
            lines = ["| " + " | ".join(row) + " |" for row in (names, ["---"] * len(names), *rows)]
            text += f"## {family}\n\n" + "\n".join(lines) + "\n\n"
    page.write_text(text.rstrip() + "\n")


def stale(cells, rows):
    """What the page says otherwise, in columns that are the same on every machine."""
    for name, row in rows.items():
        old = cells.get(name, ())
        if len(old) != len(HEADINGS):
            yield f"{name} has no row"
            continue
        for heading, before, now in zip(HEADINGS, old, row.cells, strict=True):
            if heading.checked and before != now:
                yield f"{name}, {heading.name}: {before!r} is now {now!r}"
