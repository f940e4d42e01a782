"""The queue of requests that several engines take from."""

from qspec_jax.decoding.waiting import Queue


def test_what_is_reserved_is_left_to_its_engine_while_there_is_more():
    queue = Queue(6)
    queue.reserve([0, 1], "a")
    assert queue.first(2, "a") == [0, 1] and queue.first(3, "b") == [2, 3, 4]
    assert queue.take([2, 3, 4]) and len(queue) == 3
    assert queue.first(3, "b") == [5] and queue.first(3, "a") == [0, 1, 5]


def test_an_engine_that_finds_nothing_else_takes_what_is_reserved():
    queue = Queue(3)
    queue.reserve([0, 1], "a")
    assert queue.take([2])
    assert queue.first(4, "b") == [0, 1] and queue.take([0])
    assert not queue.take([0, 1]) and len(queue) == 1  # of what was reserved together all is there, or nothing is taken
    queue.reserve([0, 1], None)
    assert queue.first(4, "b") == [1] and queue.take([1]) and not queue.first(1, "a")
