"""Segments that torch's caching allocator takes from the driver, and blocks that it reuses."""

from shardwright.simulate.memory.caching_allocator import (
    CachingAllocator,
    Request,
    reserved_bytes,
)

MIB = 2**20


def test_segments_are_of_three_sizes():
    allocator = CachingAllocator()
    sizes = []
    for size in (1, MIB, 3 * MIB, 3 * MIB, 10 * MIB, 11 * MIB):
        before = allocator.reserved
        allocator.take(size)
        sizes.append((allocator.reserved - before) // MIB)
    # The second, fourth and fifth are in segments of those before.
    assert sizes == [2, 0, 20, 0, 0, 12]
    allocator.take(MIB)
    assert allocator.reserved == (2 + 20 + 12 + 2) * MIB


def test_a_request_takes_the_smallest_free_block_and_neighbours_are_joined():
    allocator = CachingAllocator()
    parts = [allocator.take(5 * MIB) for _ in range(4)]
    assert allocator.reserved == 20 * MIB
    for chunk in (parts[1], parts[3]):
        allocator.give(chunk)
    allocator.take(8 * MIB)  # in neither hole
    assert allocator.reserved == 40 * MIB
    allocator.give(parts[2])  # 15 MiB in one piece now
    allocator.take(15 * MIB)
    assert allocator.reserved == 40 * MIB


def test_what_is_left_of_a_large_block_is_not_split_off_up_to_a_mebibyte():
    allocator = CachingAllocator()
    large = allocator.take(12 * MIB)
    allocator.give(large)
    assert allocator.take(11 * MIB).size == 12 * MIB
    again = CachingAllocator()
    again.give(again.take(12 * MIB))
    assert again.take(10 * MIB).size == 10 * MIB


def test_state_that_is_made_after_the_first_step_breaks_up_what_activations_had():
    step = [Request(1, 40 * MIB, True), Request(1, 40 * MIB, False), Request(2, 30 * MIB, True)]
    assert reserved_bytes([10 * MIB], step, []) == 50 * MIB
    # The state takes the 10 MiB that the gradient leaves of the activations: they need others.
    assert reserved_bytes([10 * MIB], step, [10 * MIB]) == 90 * MIB
