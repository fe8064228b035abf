"""Paths as a user writes them."""

from __future__ import annotations

import os


def local_path(text: str) -> str:
    """Absolute, with ~ expanded: workers run in other working directories."""
    return os.path.abspath(os.path.expanduser(text))
