"""The folder of what zeroir makes again if it is lost: compiled kernels and lowered programs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return ``ZEROIR_CACHE_DIR``, or ``zeroir`` in the user's cache folder (``XDG_CACHE_HOME``, ``~/.cache``)."""
    named = os.environ.get("ZEROIR_CACHE_DIR")
    if named:
        return Path(named).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "zeroir"
