"""Pipeline schedules as data: made, checked, priced and drawn without jax."""

from parallax.schedule.check import check_table
from parallax.schedule.csv import from_csv, read_csv, to_csv
from parallax.schedule.draw import timeline_svg, timeline_text
from parallax.schedule.op import Op, Schedule, ScheduleError
from parallax.schedule.order import GENERATORS, forward_only, gpipe, interleaved, make_schedule, one_f_one_b
from parallax.schedule.simulate import (
    Simulation,
    Span,
    bubble_formula,
    lockstep_warning,
    simulate,
    simulate_free,
    timeline,
)
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
    "from_csv",
    "gpipe",
    "interleaved",
    "lockstep_warning",
    "make_schedule",
    "one_f_one_b",
    "read_csv",
    "simulate",
    "simulate_free",
    "tick_table",
    "timeline",
    "timeline_svg",
    "timeline_text",
    "to_csv",
]
