"""Blocks of memory, their owners, and the moment when most is held."""

from shardwright.ir.graph import Op, Ref
from shardwright.ir.op_memory import Seen
from shardwright.simulate.memory.allocator import AllocatedBytes, Allocator, Use
from shardwright.tracing.op_memory.footprints import Footprints


def test_the_peak_is_remembered_with_what_it_was_made_of():
    heap = Allocator()
    saved = heap.new(100)
    heap.save(saved)
    heap.drop(saved)  # autograd alone has it now
    heap.where = "here"
    buffer = heap.new(30, Use.COMMUNICATION)
    heap.drop(buffer)
    heap.where = "later"
    heap.unsave(saved)
    heap.briefly(120)
    assert (heap.peak, heap.peak_at, heap.total) == (130, "here", 0)
    assert heap.at_peak() == {(None, Use.SAVED): 100, (None, Use.COMMUNICATION): 30}


def test_what_is_held_anyway_does_not_count_and_gradients_are_told_apart():
    heap = Allocator(granularity=512)
    heap.drop(heap.new(1000, Use.LASTING))
    assert heap.peak == 0
    block = heap.new(700)
    heap.becomes(block, Use.GRADIENT)
    heap.briefly(1)
    assert heap.at_peak()[None, Use.GRADIENT] == 700
    assert heap.peak_rounded == 324 + 511


def test_the_highest_level_is_that_since_it_was_asked_for():
    heap = Allocator(granularity=8)
    first = heap.new(100)
    heap.drop(heap.new(30))
    assert heap.highest() == AllocatedBytes(130, 4 + 2)
    assert heap.highest() == AllocatedBytes(100, 4)
    heap.drop(first)
    heap.drop(heap.new(60))
    heap.briefly(99)
    assert heap.highest() == AllocatedBytes(100, 4), "what was alive then"
    heap.drop(heap.new(60))
    heap.briefly(70)
    assert heap.highest() == AllocatedBytes(70, 2)
    assert heap.highest() == AllocatedBytes(0, 0)


def test_the_highest_moments_between_others_add_up_by_use():
    heap = Allocator()
    marks = [heap.changes]
    first = heap.new(100)
    heap.drop(heap.new(30, Use.COMMUNICATION))
    marks.append(heap.changes)
    heap.save(first)  # the same bytes for another use
    marks.append(heap.changes)
    heap.becomes(heap.new(5), Use.GRADIENT)
    heap.unsave(first)
    marks.append(heap.changes)
    first, second, third = heap.highest_between(marks)
    assert +first == {Use.WORKSPACE: 100, Use.COMMUNICATION: 30}
    assert sum(second.values()) == 100
    assert +third == {Use.SAVED: 100, Use.WORKSPACE: 5}
    assert heap.peak == 130


def test_blocks_belong_to_the_module_that_made_them_and_buckets_to_several():
    heap = Allocator()
    heap.module = "up"
    made = heap.new(100)
    heap.save(made)
    heap.module = "down"
    copy = heap.new(60, module_of=made)
    bucket = heap.new(50, Use.COMMUNICATION)
    heap.becomes(bucket, Use.GRADIENT)
    heap.assign(bucket, "up", 30)
    heap.assign(bucket, "down", 25)  # as much as is left
    assert heap.at_peak() == {
        ("up", Use.SAVED): 100,
        ("up", Use.WORKSPACE): 60,
        (None, Use.COMMUNICATION): 50,
    }, "the peak is when the last block came"
    heap.briefly(1)
    assert heap.at_peak() == {
        ("up", Use.SAVED): 100,
        ("up", Use.WORKSPACE): 60,
        ("up", Use.GRADIENT): 30,
        ("down", Use.GRADIENT): 20,
        ("down", Use.WORKSPACE): 1,
    }
    for block in (bucket, copy, made):
        heap.drop(block)
    heap.unsave(made)
    heap.briefly(heap.peak + 1)
    assert heap.at_peak() == {("down", Use.WORKSPACE): heap.peak}, "all of it was given back"


def seen(*shape, strides=None, grad=True):
    return Seen(shape, strides or (shape[1], 1), "float32", grad)


def test_footprints_are_what_torch_does():
    book = Footprints()
    add = Op("y", "aten.add.Tensor", (Ref("a"), Ref("b")), (), ("y",))
    two = (seen(4, 8), seen(4, 8))
    assert book.call(add, "ab", two).forward.saved == ()
    back = book.call(add, "ab", two).backward(((8, 1),))
    assert back.events == ((3, 128),)  # its own gradient,
    assert [number for number, _ in back.gradients] == [3, 3]  # which both are given
    view = Op("y", "aten.reshape.default", (Ref("a"), (32,)), (), ("y",))
    straight, turned = seen(4, 8), seen(4, 8, strides=(1, 4))
    assert book.call(view, "a", (straight,)).forward.made == ()
    assert book.call(view, "a", (turned,)).forward.made == (128,)  # has to be copied
    gelu = Op("y", "aten.gelu.default", (Ref("a"),), (), ("y",))
    assert book.call(gelu, "a", (straight,)).forward.saved == (0,)
    # The result's gradient and what is saved live until the operand's gradient is there.
    assert book.call(gelu, "a", (straight,)).backward(((8, 1),)).events == (
        (2, 128),
        (3, 128),
        (2, -1),
        (0, -1),
    )
