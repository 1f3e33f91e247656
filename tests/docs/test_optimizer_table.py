"""The table of the optimizers in the documentation is what they declare."""

from __future__ import annotations

import re
from pathlib import Path

from zeroir.ir.optimizers.catalogue import Algorithm
from zeroir.ir.optimizers.settings import Setting

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
HEAD = "| `optimizer` | is | settings, with their defaults | states, in FP32 |\n|---|---|---|---|\n"


def table() -> str:
    return HEAD + "".join(f"| {' | '.join(row(algorithm))} |\n" for algorithm in Algorithm)


def row(algorithm: Algorithm) -> tuple[str, str, str, str]:
    declaration = algorithm.declaration
    of_torch = declaration.torch
    what = declaration.definition if of_torch is None else f"`torch.optim.{of_torch.class_name}`"
    settings = [setting for setting in declaration.settings if setting.fixed is None]
    return f"`{algorithm}`", what, ", ".join(map(shown, settings)), states(algorithm)


def shown(setting: Setting) -> str:
    default = setting.default
    numbers = ", ".join(f"{n:g}" for n in default) if isinstance(default, tuple) else ""
    value = f"{default:g}" if type(default) is float else str(default)
    return f"`{setting.name}` ({numbers or value})"


def states(algorithm: Algorithm) -> str:
    count, own = len(algorithm.state_names), algorithm.declaration.own_state
    if own is not None:
        return f"{own.description}, {'sharded' if own.is_sharded else 'on every rank'}"
    numbers = {1: "one number", 2: "two numbers"}
    return f"{numbers[count]} for each element, sharded" if count else "none"


def test_the_documentation_has_the_table(update_golden: bool) -> None:
    text = PAGE.read_text("utf-8")
    wanted = re.sub(rf"{re.escape(HEAD)}(\|.*\n)*", lambda _: table(), text)
    if update_golden:
        PAGE.write_text(wanted, "utf-8")
    assert PAGE.read_text("utf-8") == wanted
    assert table() in wanted
