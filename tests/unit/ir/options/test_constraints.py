import pytest

from shardwright.ir.layout import Mesh, Replicate, Shard
from shardwright.ir.options.constraints import (
    Along,
    Cap,
    ConstraintError,
    Forbid,
    OnMesh,
    OnShape,
    Pin,
    matches,
    parse_constraints,
)


def parsed(text):
    (constraint,) = parse_constraints([text])
    return constraint


@pytest.mark.parametrize(
    "text, constraint",
    [
        ("pin h.*.attn=tp:heads", Pin("h.*.attn", (Along("tp", ("heads",)),))),
        (
            "pin *=dp:batch, tp:queries per head",
            Pin("*", (Along("dp", ("batch",)), Along("tp", ("queries per head",)))),
        ),
        ("forbid down=*:features (sum)", Forbid("down", (Along("*", ("features (sum)",)),))),
        ("pin up=tp:features|whole", Pin("up", (Along("tp", ("features", "whole")),))),
        (
            "pin *.weight=dp:S(0) tp:R",
            Pin("*.weight", (Along("dp", ("S(0)",)), Along("tp", ("R",)))),
        ),
        ("mesh dp=4,tp=2", OnMesh(Mesh.parse("dp=4 tp=2"))),
        ("mesh 4x2", OnShape((4, 2))),
        ("cap tp=8", Cap("tp", 8)),
    ],
)
def test_text_is_read_and_printed_again(text, constraint):
    assert parsed(text) == constraint
    assert parsed(str(constraint)) == constraint


def test_words_of_parameters_are_placements():
    assert parsed("pin *=dp:S(1.2)|R").along[0].placements == (Shard(1, 2), Replicate())
    assert parsed("pin *=dp:batch").along[0].placements == ()


def test_a_constraint_said_twice_is_one():
    assert len(parse_constraints(["cap tp=2", Cap("tp", 2), "cap  tp=2"])) == 1


@pytest.mark.parametrize(
    "glob, path, fits",
    [
        ("*", "", True),
        ("layers.*.mlp", "layers.10.mlp", True),
        ("layers.*.mlp", "layers.10.mlp.up", True),
        ("layers.1", "layers.10.mlp", False),
        ("layers.[12]", "layers.2.mlp", True),
        ("mlp", "layers.0.mlp", False),
        ("*mlp", "layers.0.mlp", True),
    ],
)
def test_a_glob_means_a_module_and_all_in_it(glob, path, fits):
    assert matches(glob, path) is fits


@pytest.mark.parametrize(
    "text, message",
    [
        ("pin", "'pin' is no constraint; write it as 'pin layers.*.mlp=tp:features'"),
        ("keep a=tp:b", "is no constraint"),
        ("pin mlp", "is not GLOB=AXIS:WORD"),
        ("pin mlp=features", "is not GLOB=AXIS:WORD"),
        ("pin =tp:features", "is not GLOB=AXIS:WORD"),
        ("pin mlp=x tp:features", "is not GLOB=AXIS:WORD"),
        ("pin mlp=tp:", "has no word after 'tp'; write it as tp:batch"),
        ("pin mlp=tp:a|", "has no word after 'tp'"),
        ("pin w=tp:S(x)", "placement 'S(x)' is none of R, P, S(dim) and S(dim.atom)"),
        ("pin w=tp:P", "stored as R or S(dim), never as P"),
        ("pin w=tp:R|batch", "mixes how parameters are stored (R) with what operators split"),
        ("mesh dp=4 tp", "mesh 'dp=4 tp': 'tp' is not name=size"),
        ("mesh dp=2 dp=2", "must have different names"),
        ("mesh 2x2x2x2x2", "has 5 axes; give at most 4"),
        ("cap tp=0", "is no cap; write it as 'cap tp=4'"),
        ("cap tp", "is no cap"),
    ],
)
def test_a_mistake_says_how_to_write_it(text, message):
    with pytest.raises(ConstraintError) as error:
        parse_constraints([text])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_one_text_in_place_of_a_list_is_a_mistake():
    with pytest.raises(ConstraintError, match="are a list of texts"):
        parse_constraints("cap tp=2")
