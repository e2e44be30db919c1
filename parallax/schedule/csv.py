"""A schedule as CSV, in the form of PyTorch's `torch.distributed.pipelining` (its `compute_only` format). No jax."""

from parallax.schedule.order import Schedule


def to_csv(schedule: Schedule) -> str:
    """One line a rank; a cell is stage, action ("F" forward, "B" full backward), microbatch: `0F0`, `1B3`. PyTorch
    also reads empty cells, for waits; here the order alone is written, since the ticks follow from it."""
    return "".join(",".join(map(str, order)) + "\n" for order in schedule.orders)
