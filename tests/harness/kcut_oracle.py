"""SoyBean's one-cut by enumeration, from its tables as the paper has them; imports nothing of ours.

A net is a list of operators, each (name, kind, operands, shape): `linear` reads a value and has a
weight of its own, (out, in), `add` reads two values, `relu` one. Along one cut a tensor is cut by
rows (0) or columns (1), replicated ("R"), or partial sums ("P").
"""

from itertools import product
from math import prod

ITEM = 4  # bytes of an element

# kind -> form -> how each operand is wanted and its gradient comes back, how the result comes out.
# A linear layer's last operand is its weight.
DIVIDED = {
    "linear": {
        "b0": (((0, 0), ("R", "P")), 0),
        "n": ((("R", "P"), (0, 0)), 1),
        "k": (((1, 1), (1, 1)), "P"),
    },
    "add": {"d0": (((0, 0), (0, 0)), 0), "d1": (((1, 1), (1, 1)), 1)},
    "relu": {"d0": (((0, 0),), 0), "d1": (((1, 1),), 1)},
}
# Where a tensor is too small to be divided: computed whole, or partial sums passed on.
UNDIVIDED = {
    "linear": {
        "None": ((("R", "R"), ("R", "R")), "R"),
        "+0": ((("P", "R"), ("R", "P")), "P"),
        "+1": ((("R", "P"), ("P", "R")), "P"),
    },
    "add": {
        "None": ((("R", "R"), ("R", "R")), "R"),
        "+0": ((("P", "R"), ("P", "R")), "P"),
    },
    "relu": {"None": ((("R", "R"),), "R")},
}


def table(src, dst, parts):
    """What a conversion moves across one cut: of the tensor before it, after it, or the smaller."""
    cut = (0, 1)
    if src == dst or src == "R" or dst == "P":
        return 0, 0, 0
    if src in cut and dst in cut:
        return 0, 0, (parts - 1) / parts
    if src in cut:
        return 0, parts - 1, 0
    return (parts - 1, 0, 0) if dst in cut else (parts - 1, parts - 1, 0)


def moved(elements, src, dst, parts):
    """Bytes that cross all cuts in all groups; `src` and `dst` have a placement for each cut."""
    total = 0
    for i, (s, d, p) in enumerate(zip(src, dst, parts, strict=True)):
        earlier = list(zip(src, dst, parts, strict=True))[:i]
        before = prod(q for a, b, q in earlier if a == "P" or (a == "R" and b in ("R", "P")))
        after = prod(q for _, b, q in earlier if b in ("R", "P"))
        coefficients = table(s, d, p)
        total += sum(
            c * n for c, n in zip(coefficients, (before, after, min(before, after)), strict=True)
        )
    return ITEM * elements * total


def tiles(size, parts):
    """Whether `size` rows, cut into so many tiles one cut after the other, leave none empty."""
    for p in parts:
        size -= (p - 1) * -(-size // p)
        if size <= 0:
            return False
    return True


class Net:
    """A net on an input of shape `start`, cut into `parts[0]`, then each part into `parts[1]`, …"""

    def __init__(self, ops, start, parts):
        self.ops, self.parts = ops, parts
        self.shape = {"x": start} | {name: shape for name, _, _, shape in ops}
        self.weights = {
            name: (shape[1], self.shape[operands[0]][1])
            for name, kind, operands, shape in ops
            if kind == "linear"
        }
        self.kind = {name: kind for name, kind, _, _ in ops}

    def forms(self, name):
        return DIVIDED[self.kind[name]] | UNDIVIDED[self.kind[name]]

    def sizes(self, name):
        """Size of what each form divides."""
        if self.kind[name] == "linear":
            (out, inside), rows = self.weights[name], self.shape[name][0]
            return {"b0": rows, "n": out, "k": inside}
        return {"d0": self.shape[name][0], "d1": self.shape[name][1]}

    def legal(self, name, earlier):
        """Forms for one more cut, given those of the cuts before."""
        good = []
        for form, size in self.sizes(name).items():
            same = [p for p, f in zip(self.parts, earlier, strict=False) if f == form]
            if tiles(size, [*same, self.parts[len(earlier)]]):
                good.append(form)
        return good or list(UNDIVIDED[self.kind[name]])

    def cost(self, chosen):
        """Bytes of the best storage for `chosen`: the forms of every operator, one for each cut."""
        cuts = range(len(next(iter(chosen.values()))))
        parts = [self.parts[i] for i in cuts]
        total = 0
        lies = {"x": ["R" for _ in cuts]}
        for name, kind, operands, _ in self.ops:
            forms = [self.forms(name)[form] for form in chosen[name]]
            for at, value in enumerate(operands):
                want = [wants[at][0] for wants, _ in forms]
                grad = [wants[at][1] for wants, _ in forms]
                elements, src = prod(self.shape[value]), lies[value]
                reads = 2 if kind == "linear" else 1  # its backward reads its operand again
                total += reads * moved(elements, src, want, parts)
                if value != "x":
                    total += moved(elements, grad, dual(src), parts)
            if kind == "linear":
                want = [wants[-1][0] for wants, _ in forms]
                grad = [wants[-1][1] for wants, _ in forms]
                shape = self.weights[name]
                total += min(
                    2 * moved(prod(shape), stored, want, parts)
                    + moved(prod(shape), grad, stored, parts)
                    for stored in self.storage(shape, parts)
                )
            lies[name] = [out for _, out in forms]
        return total

    def storage(self, shape, parts):
        for stored in product(("R", 0, 1), repeat=len(parts)):
            split = [[p for p, s in zip(parts, stored, strict=True) if s == dim] for dim in (0, 1)]
            if all(tiles(size, cuts) for size, cuts in zip(shape, split, strict=True)):
                yield list(stored)

    def best(self, earlier):
        """Least bytes of one more cut together with those before: operator -> their forms."""
        names = [name for name, *_ in self.ops]
        choices = [self.legal(name, earlier[name]) for name in names]
        return min(
            self.cost({n: (*earlier[n], form) for n, form in zip(names, forms, strict=True)})
            for forms in product(*choices)
        )


def dual(placements):
    return ["R" if p == "P" else p for p in placements]
