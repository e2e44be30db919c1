"""The verb `parallax plan`."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Choose a layout."


def run(args: argparse.Namespace) -> int:
    raise NotImplementedError
