"""The version that is installed."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    try:
        return importlib.metadata.version("parallax-train")
    except importlib.metadata.PackageNotFoundError:
        return "of a source folder, not installed"
