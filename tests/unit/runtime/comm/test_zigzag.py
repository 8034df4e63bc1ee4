"""Halves that devices send each other to zigzag order: who sends what, and where it lies."""

import pytest

from shardwright.ir.layout import chunk, zigzag_runs
from shardwright.runtime.comm.zigzag import half_moves


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("size", [7, 16, 29])
@pytest.mark.parametrize("back", [False, True])
def test_what_one_sends_another_receives_and_every_tile_is_filled(ranks, size, back):
    tiles = [[chunk(size, ranks, rank)] for rank in range(ranks)]
    zigzag = [zigzag_runs(size, ranks, rank) for rank in range(ranks)]
    before, after = (zigzag, tiles) if back else (tiles, zigzag)
    moves = [half_moves(size, ranks, rank, back=back) for rank in range(ranks)]
    for rank, (sent, received) in enumerate(moves):
        assert sum(one.length for one in sent) == sum(n for _, n in before[rank])
        assert sum(one.length for one in received) == sum(n for _, n in after[rank])
        for peer in range(ranks):
            to = [(one.number, one.length) for one in sent if one.peer == peer]
            there = [(one.number, one.length) for one in moves[peer][1] if one.peer == rank]
            assert to == there, "messages between two arrive in the order sent"
    whole = list(range(size))
    held = [[i for start, n in runs for i in whole[start : start + n]] for runs in before]
    for rank, (_, received) in enumerate(moves):
        found = [None] * sum(n for _, n in after[rank])
        for one in received:
            (other,) = (
                each
                for each in moves[one.peer][0]
                if (each.peer, each.number) == (rank, one.number)
            )
            part = held[one.peer][other.start : other.start + other.length]
            found[one.start : one.start + one.length] = part
        assert found == [i for start, n in after[rank] for i in whole[start : start + n]]
