"""The form of a graph that a strategy is priced on: its loss in chunks, its products in 8 bits."""

from __future__ import annotations

from shardwright.ir.graph import Graph
from shardwright.ir.options.fp8 import Fp8Recipe, executed_by
from shardwright.ir.strategy.fields import chunks_of
from shardwright.ir.strategy.recompute import StrategyError
from shardwright.ir.strategy.strategy import Strategy
from shardwright.rules.operators.fp8_layers import Fp8LayersError, with_fp8
from shardwright.rules.operators.loss_chunks import LossChunksError, with_loss_chunks


def recipe_for(strategy: Strategy) -> Fp8Recipe | None:
    """The recipe of a strategy, by the library that its `compile` says; None if it has none."""
    if strategy.fp8 is None:
        return None
    return executed_by(strategy.fp8, compiled=strategy.compile != "off")


def in_8_bit(name: str | None) -> Strategy:
    """A strategy with a recipe, compiled if torchao has it; raises `StrategyError` for another."""
    one = Strategy(fp8=name)
    compiled = one.but(compile="regional")
    return one if recipe_for(compiled) is None else compiled


def form_of(graph: Graph, strategy: Strategy) -> Graph:
    """`graph` with the loss and the products of a strategy; itself if they are those of the graph.

    A graph in 8 bits stays so under a strategy that says no recipe. Raises `StrategyError` if the
    model does not permit that loss or recipe.
    """
    count, now = chunks_of(strategy.loss), graph.numerics
    if count is not None and count != now.loss_chunks:
        try:
            graph = with_loss_chunks(graph, count)
        except LossChunksError as e:
            raise StrategyError(f"loss={strategy.loss}: {e}") from e
    recipe = recipe_for(strategy)
    if recipe is None or recipe.key == now.fp8:
        return graph
    if now.fp8:
        raise StrategyError(f"fp8={strategy.fp8} on a graph whose products are {now.fp8} already")
    try:
        return with_fp8(graph, recipe)
    except Fp8LayersError as e:
        raise StrategyError(f"fp8={strategy.fp8}: {e}; leave it out") from e
