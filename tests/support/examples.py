"""How many examples hypothesis tries: all that a test names in the whole suite, a fifth of them in a quick run."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Final

from hypothesis import HealthCheck, settings

IS_THOROUGH: Final = os.environ.get("ZEROIR_TEST_EXAMPLES") == "all"
_FEWEST: Final = 4


def examples(count: int, *, suppress_health_check: Collection[HealthCheck] = ()) -> settings:
    """Settings for a test that tries ``count`` examples, however long one takes."""
    tried = count if IS_THOROUGH else max(min(count, _FEWEST), count // 5)
    return settings(
        max_examples=tried, deadline=None, suppress_health_check=tuple(suppress_health_check)
    )
