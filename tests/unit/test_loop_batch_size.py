"""The batch-size ramp against Megatron-LM's rule, in exact fractions, and against counting."""

from __future__ import annotations

from fractions import Fraction
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from parallax.batch_size import batch_size, batch_sizes, samples_after
from parallax.config import Train


def train(full: int, ramp: tuple[int, ...]) -> Train:
    return Train(steps=1, seq_len=1, global_batch_size=full, rampup_batch_size=ramp)


ramps = st.builds(
    lambda unit, start, increment, increments, over: train(
        unit * (start + increment * increments), (unit * start, unit * increment, over)
    ),
    *(st.integers(1, 8) for _ in range(4)),
    st.integers(1, 2000),
)


@given(ramps, st.integers(0, 4000))
def test_the_rule(config: Train, consumed: int):
    start, increment, over = config.rampup_batch_size
    if consumed > over:
        assert batch_size(config, consumed) == config.global_batch_size
        return
    samples_an_increment = Fraction(over) / ((config.global_batch_size - start) // increment)
    expected = start + int(consumed / samples_an_increment) * increment
    assert batch_size(config, consumed) == expected <= config.global_batch_size


def test_written_out():
    sizes = [8, 8, 8, 8, 8, 16, 16, 24, 24, 32, 32]  # 33 1/3 samples an increment
    assert list(islice(batch_sizes(train(32, (8, 8, 100)), 0), len(sizes))) == sizes
    assert list(islice(batch_sizes(train(32, ()), 0), 3)) == [32, 32, 32]


@given(ramps, st.integers(0, 300), st.integers(0, 300))
def test_a_resumed_run_goes_on_with_the_same_sizes(config: Train, before: int, after: int):
    sizes = list(islice(batch_sizes(config, 0), before + after))
    assert samples_after(config, 0, before) == sum(sizes[:before])
    assert samples_after(config, 0, before + after) == sum(sizes)
    assert list(islice(batch_sizes(config, sum(sizes[:before])), after)) == sizes[before:]


def test_a_long_run_is_counted_at_once():
    """By hand: the ramp's end is far; then it has a third of its samples at each of three sizes, rounded up."""
    assert samples_after(train(2, (1, 1, 10**12)), 0, 10**9) == 10**9
    steps, of_three = 2 * 10**9, 333_333_334
    full = steps - 10**9 - 5 * 10**8 - of_three
    samples = 10**9 + 2 * 5 * 10**8 + 3 * of_three + 4 * full
    assert samples_after(train(4, (1, 1, 3 * 10**9)), 0, steps) == samples
