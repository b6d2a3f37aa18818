"""Spans, held against sets of numbers."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from rmqstore.spans import joined, without

NUMBERS = st.integers(0, 30)
SPANS = st.lists(st.tuples(NUMBERS, NUMBERS).map(lambda ends: (min(ends), max(ends))), max_size=8)


def numbers_of(spans):
    return {number for begin, end in spans for number in range(begin, end)}


def is_ascending(spans):
    return all(begin < end for begin, end in spans) and all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


@given(NUMBERS, NUMBERS, SPANS)
def test_without_leaves_what_no_span_has(begin, end, spans):
    left = without(begin, end, spans)
    assert is_ascending(left)
    assert numbers_of(left) == set(range(begin, end)) - numbers_of(spans)


@given(SPANS)
def test_joined_spans_have_the_same_numbers_and_do_not_touch(spans):
    found = joined(spans)
    assert is_ascending(found)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(found))
    assert numbers_of(found) == numbers_of(spans)
