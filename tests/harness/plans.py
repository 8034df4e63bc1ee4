"""Small plans and frontiers written by hand, for the packages that read them."""

from dataclasses import replace

from shardwright.ir.frontier import Frontier
from shardwright.ir.graph import Source
from shardwright.ir.layout import Layout, Mesh
from shardwright.ir.plan import (
    InputSpec,
    Phase,
    Plan,
    PlannedOp,
    PlannedParameter,
    PlannedTransfer,
    Remark,
    RemarkKind,
)
from shardwright.ir.timeline import Stream, Task, Track
from shardwright.planner.settle import charged_seconds
from shardwright.simulate.time.timeline import schedule

MS, MIB = 1e-3, 2**20
WORDS = {"-": "-", "m": "batch", "n": "features", "k": "features (sum)"}
WORDS |= {"d0": "batch", "d1": "features"}
MESH = Mesh.parse("dp=2 tp=2")


def added_seconds(plan, machine):
    """The seconds of a plan's parts, of messages of parameters what tables count of them."""
    weights = {one.name for one in plan.parameters}
    moved = (
        charged_seconds(one, machine) if one.value in weights else one.seconds
        for one in plan.transfers
    )
    return sum(one.seconds for one in (*plan.ops, *plan.parameters)) + sum(moved)


def layout(text, mesh=MESH):
    return Layout.parse(text, mesh)


def op(name, kind, module, line, tiling, lies, ms=1.0, saved_mib=1, mesh=MESH):
    source = Source(module, f"/somewhere/user/model_{module.rpartition('.')[2]}.py", line)
    seconds, saved = ms * MS, int(saved_mib * MIB)
    return PlannedOp(
        name,
        f"aten.{kind}.default",
        source,
        tuple(tiling.split()),
        tuple(WORDS[word] for word in tiling.split()),
        layout(lies, mesh),
        seconds,
        saved,
    )


def parameter(name, lies, mib=4, ms=0.5, mesh=MESH):
    return PlannedParameter(name, layout(lies, mesh), int(mib * MIB), ms * MS)


def moved(value, consumer, direction, collectives, mib, ms):
    collectives = tuple(collectives.split(", "))
    return PlannedTransfer(value, consumer, Phase(direction), collectives, int(mib * MIB), ms * MS)


def block(i, odd=False):
    """One of three blocks; the odd one splits its second layer otherwise."""
    up, down = f"blocks.{i}.up", f"blocks.{i}.down"
    return (
        (
            op(f"linear_{i}", "linear", up, 30, "m n", "dp:S(0) tp:S(1)", 4.0, 8),
            op(f"relu_{i}", "relu", up, 31, "d0 d1", "dp:S(0) tp:S(1)", 0.1, 8),
            op(
                f"down_{i}", "linear", down, 40, "m k" if not odd else "m -", "dp:S(0) tp:P", 4.0, 8
            ),
        ),
        (
            parameter(f"{up}.weight", "dp:R tp:S(0)"),
            parameter(f"{up}.bias", "dp:R tp:S(0)", 0.125, 0.01),
            parameter(f"{down}.weight", "dp:S(1) tp:S(1)" if not odd else "dp:R tp:R", 4),
        ),
        (
            moved(f"down_{i}", f"down_{i}", "forward", "all_reduce tp", 2, 0.5),
            moved(f"{up}.weight", f"linear_{i}", "backward", "all_reduce dp", 1, 0.25),
            moved(f"{up}.bias", f"linear_{i}", "backward", "all_reduce dp", 0.001, 0.05),
            moved(f"{down}.weight", f"down_{i}", "forward", "slice tp, all_gather dp", 1, 0.3),
        ),
    )


def transformer():
    """A plan of an embedding, three blocks of which the last differs, and a tied head."""
    blocks = [block(0), block(1), block(2, odd=True)]
    ops = [op("embedding", "embedding", "embed", 12, "m -", "dp:S(0) tp:R", 0.5, 2)]
    parameters = [parameter("embed.weight", "dp:S(0) tp:R", 16, 2.0)]
    transfers = [
        moved("embed.weight", "embedding", "forward", "all_gather dp", 8, 3.0),
        moved("embed.weight", "head", "backward", "reduce_scatter dp", 8, 3.5),
    ]
    for its_ops, its_parameters, its_transfers in blocks:
        ops += its_ops
        parameters += its_parameters
        transfers += its_transfers
    ops.append(op("head", "linear", "", 50, "m -", "dp:S(0) tp:R", 6.0, 4))
    return Plan(
        fingerprint="0123456789abcdef",
        machine="4xcpu",
        mesh=MESH,
        optimizer="adamw",
        step_seconds=45.63 * MS,
        peak_bytes=150 * MIB,
        lower_bound_seconds=45 * MS,
        inputs=(InputSpec("kwargs.input_ids", (8, 128), "int64"),),
        constants=(),
        parameters=tuple(parameters),
        ops=tuple(ops),
        transfers=tuple(transfers),
        notes=("the graph is too wide to search whole; pinned: blocks.0.up <&>",),
        remarks=(
            Remark(RemarkKind.DISCOVERED, "foo.bar.default", "f0 f1 -> f0 f1", ("relu_0",), 1),
            Remark(
                RemarkKind.REPLICATED,
                "foo.baz.default",
                "no rule is written",
                ("head", "relu_1"),
                2,
            ),
            Remark(
                RemarkKind.EXPLICIT,
                "attention with dropout",
                "computed by its formula",
                ("linear_0", "relu_2"),
                1,
            ),
        ),
    )


def simple(name="searched", ms=100.0, mib=100, mesh="dp=2", lies="S(0)", weight="R", comm_ms=10.0):
    """A plan of one linear layer on one axis, with the given costs."""
    mesh = Mesh.parse(mesh)
    axis = mesh.names[0]
    tiling = {"R": "-", "S(0)": "m", "S(1)": "n", "P": "k"}[lies]
    return Plan(
        fingerprint="0123456789abcdef",
        machine=f"{mesh.size}xcpu",
        mesh=mesh,
        optimizer="sgd",
        step_seconds=ms * MS,
        peak_bytes=mib * MIB,
        lower_bound_seconds=ms * MS,
        inputs=(InputSpec("args.0", (8, 4), "float32"),),
        constants=(),
        parameters=(parameter("layers.0.linear.weight", f"{axis}:{weight}", 1, 1.0, mesh),),
        ops=(
            op(
                "y", "linear", "layers.0.linear", 7, tiling, f"{axis}:{lies}",
                ms - comm_ms - 1, 1, mesh,
            ),
        ),
        transfers=(
            moved("layers.0.linear.weight", "y", "backward", f"all_reduce {axis}", 1, comm_ms),
        ),
        name=name,
    )  # fmt: skip


def frontier():
    """Three plans, fastest first, and two baselines that none of them is worse than."""
    fast = simple(ms=80, mib=300, comm_ms=5)
    middle = simple(ms=100, mib=200, lies="S(1)", weight="S(0)")
    small = simple(ms=150, mib=100, lies="R", weight="S(0)")
    return Frontier(
        (fast, middle, small),
        (simple("data parallel", 90, 320, comm_ms=15), simple("fully sharded", 160, 120)),
        search_seconds=0.5,
    )


def on_devices(plan, devices):
    """The same costs for another number of devices, replicated."""
    return replace(simple(mesh=f"dp={devices}"), name=plan.name)


def fastest_by_sums(frontier, limit):
    """The fastest plan whose memory, as it adds up, is within `limit`: what bounds are about."""
    return next(plan for plan in frontier if plan.peak_bytes <= limit)


def timed(plan):
    """The plan with a timeline in which everything comes after what is before it."""
    ranks = f"each of {plan.devices} ranks"
    here, net = Track(ranks, Stream.COMPUTE), Track(ranks, Stream.COMMUNICATION)
    made = []

    def add(name, track, seconds, kind, where):
        made.append(Task(name, track, seconds, (len(made) - 1,) if made else (), kind, where))

    def sent(consumer):
        for one in (t for t in plan.transfers if t.consumer == consumer):
            add(f"{one.collectives[0]}: {one.value}", net, one.seconds, one.phase.value, consumer)

    for one in plan.ops:
        where = one.source.module
        sent(one.name)
        name = f"{where}: {one.target.split('.')[1]}"
        add(name, here, one.forward_seconds, "forward", where)
        add(name, here, one.backward_seconds, "backward", where)
    sent("")
    add("update", here, sum(one.seconds for one in plan.parameters), "update", "")
    return replace(plan, timeline=schedule(made))
