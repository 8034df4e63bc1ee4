"""The form of a graph that a strategy is priced on: loss and MLPs in chunks, products in 8 bits."""

from __future__ import annotations

from shardwright.ir.graph import Graph
from shardwright.ir.options.fp8 import Fp8Recipe, executed_by, recipe_of
from shardwright.ir.strategy.fields import chunks_of
from shardwright.ir.strategy.recompute import StrategyError
from shardwright.ir.strategy.strategy import Strategy
from shardwright.rules.operators.chunks import with_chunks
from shardwright.rules.operators.fp8_layers import Fp8LayersError, with_fp8
from shardwright.rules.operators.loss_chunks import LossChunksError, fused_chunks
from shardwright.rules.operators.mlp_chunks import MlpChunksError


def recipe_for(strategy: Strategy) -> Fp8Recipe | None:
    """The recipe of a strategy, by the library that its `compile` says; None if it has none."""
    if strategy.fp8 is None:
        return None
    compiled = strategy.compile != "off"
    return executed_by(strategy.fp8, compiled=compiled, gathers=strategy.fp8_gather)


def runs_as(recipe: Fp8Recipe | None, key: str) -> bool:
    """Whether a graph with this key has the products of a recipe, and gathers that it may have.

    A graph whose sharded weights are gathered in 8 bits serves strategies that shard none.
    """
    known = recipe_of(key)
    if recipe is None or known is None:
        return recipe is known
    return recipe.key == key or (known.gathers and recipe.products_key == known.products_key)


def in_8_bit(name: str | None) -> Strategy:
    """A strategy with a recipe, compiled if torchao has it; raises `StrategyError` for another."""
    one = Strategy(fp8=name)
    compiled = one.but(compile="regional")
    return one if recipe_for(compiled) is None else compiled


def loss_chunks_of(strategy: Strategy, graph: Graph) -> int | None:
    """The chunks in which a strategy computes the loss of a graph; None where it says none.

    A fused loss is executed and priced in chunks, which compute the same. One that a graph has in
    chunks already stays so. Raises `LossChunksError` if the model does not permit a fused one.
    """
    if strategy.loss != "fused":
        return chunks_of(strategy.loss)
    known = graph.numerics.loss_chunks
    return known if known > 1 else fused_chunks(graph)


def form_of(graph: Graph, strategy: Strategy) -> Graph:
    """`graph` with the loss, MLPs and products of a strategy; itself if it has them.

    A graph in 8 bits stays so under a strategy that says no recipe. Raises `StrategyError` if the
    model does not permit these.
    """
    recipe, now = recipe_for(strategy), graph.numerics
    if strategy.fp8 and chunks_of(strategy.mlp) is not None:
        raise StrategyError(
            f"mlp={strategy.mlp}: its products are not in 8 bits; leave it or fp8 out"
        )
    mlp = chunks_of(strategy.mlp)
    try:
        loss = loss_chunks_of(strategy, graph)
        graph = with_chunks(graph, loss or now.loss_chunks, mlp or now.mlp_chunks)
    except LossChunksError as e:
        raise StrategyError(f"loss={strategy.loss}: {e}") from e
    except MlpChunksError as e:
        raise StrategyError(f"mlp={strategy.mlp}: {e}") from e
    if recipe is None or runs_as(recipe, now.fp8):
        return graph
    if now.fp8:
        raise StrategyError(f"fp8={strategy.fp8} on a graph whose products are {now.fp8} already")
    try:
        return with_fp8(graph, recipe)
    except Fp8LayersError as e:
        raise StrategyError(f"fp8={strategy.fp8}: {e}; leave it out") from e
