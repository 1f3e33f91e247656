"""``zeroir completion``: the scripts by which shells complete commands, options and their values."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from cyclopts import Parameter


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="The shell.")], /
) -> int:
    """Print the script by which a shell completes commands, options and their values.

    Example: eval "$(zeroir completion bash)"
    """
    from zeroir.cli.app import app

    sys.stdout.write(app.generate_completion(prog_name="zeroir", shell=shell))
    return 0
