"""The command line. ``main`` maps every failure to one sentence and an exit code."""

from zeroir.cli.app import main

__all__ = ["main"]
