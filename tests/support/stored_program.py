"""The compiled program of the present schema that is stored beside the tests, which have it without compiling."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from zeroir.artifact import SCHEMA_VERSION

STORED: Final = Path(__file__).parents[1] / "data" / "schema_{}_{}.zir".format(*SCHEMA_VERSION)
