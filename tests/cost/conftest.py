"""Fixtures of the tests of commands."""

from __future__ import annotations

from tests.cli.conftest import programs, zeroir

__all__ = ["programs", "zeroir"]
