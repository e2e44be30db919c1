"""Pipeline schedules as data: made, checked, priced and drawn without jax."""

from parallax.schedule.check import check_table
from parallax.schedule.csv import to_csv
from parallax.schedule.draw import timeline_svg, timeline_text
from parallax.schedule.order import (
    GENERATORS,
    Op,
    Schedule,
    ScheduleError,
    forward_only,
    gpipe,
    interleaved,
    make_schedule,
    one_f_one_b,
)
from parallax.schedule.simulate import Simulation, Span, bubble_formula, simulate, simulate_free
from parallax.schedule.table import FIELDS, Buffers, Row, Run, TickTable, tick_table

__all__ = [
    "FIELDS",
    "GENERATORS",
    "Buffers",
    "Op",
    "Row",
    "Run",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "Span",
    "TickTable",
    "bubble_formula",
    "check_table",
    "forward_only",
    "gpipe",
    "interleaved",
    "make_schedule",
    "one_f_one_b",
    "simulate",
    "simulate_free",
    "tick_table",
    "timeline_svg",
    "timeline_text",
    "to_csv",
]
