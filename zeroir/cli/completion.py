"""``zeroir completion``: the scripts by which shells complete commands, options and their values."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from cyclopts import Parameter

_REGISTER_IN_ZSH = """
# zsh calls this file as a function if the folders of its completions hold it under the name _cyclopts_zeroir.
if [[ "${funcstack[1]}" == _cyclopts_zeroir ]]; then
  _cyclopts_zeroir "$@"
else
  (( ${+functions[compdef]} )) || { autoload -Uz compinit && compinit }
  compdef _cyclopts_zeroir zeroir
fi
"""
"""The generated script only defines its function: a shell that evaluates it would complete nothing."""


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="The shell.")], /
) -> int:
    """Print the script by which a shell completes commands, options and their values.

    bash and zsh evaluate it at their start, and fish reads it from ~/.config/fish/completions/zeroir.fish.

    Example: eval "$(zeroir completion bash)"
    """
    from zeroir.cli.app import app

    sys.stdout.write(app.generate_completion(prog_name="zeroir", shell=shell))
    if shell == "zsh":
        sys.stdout.write(_REGISTER_IN_ZSH)
    return 0
