"""Options as texts: their values, and the sentence on the first wrong one."""

from __future__ import annotations

import difflib

from pydantic import ValidationError

from zeroir.config.option_fields import OptionFields


def text_of(value: object, separator: str = ",") -> str:
    """The text of an option's value; the separator stands between the items of a list."""
    match value:
        case bool():
            return str(value).lower()
        case tuple():
            return separator.join(map(str, value))
        case _:
            return str(value)


def explain_validation(error: ValidationError, *, command: str = "compile") -> str:
    """One sentence on the first wrong option: its name, its value and the expected values."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        problem = first["msg"].removeprefix("Value error, ")
        if problem.startswith("--group "):
            return f"{problem}."
        return f"These options do not go together: {problem}."
    name = str(first["loc"][0]).replace("_", "-")
    if first["type"] == "extra_forbidden":
        options = (option.replace("_", "-") for option in OptionFields.model_fields)
        nearest = difflib.get_close_matches(name, options, n=1)
        hint = f" did you mean --{nearest[0]}?" if nearest and command == "compile" else ""
        return f"There is no option --{name};{hint} `zeroir {command} --help` lists them."
    expected = first["msg"].removeprefix("Input should be ")
    given = first["input"]
    if isinstance(given, list | tuple) and all(isinstance(item, str) for item in given):
        given = text_of(tuple(given))
    return f"--{name} is {given!s}, but should be {expected}."


def first_problem(error: ValidationError) -> str:
    """The first problem of a group's settings, as the end of a sentence."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        return first["msg"].removeprefix("Value error, ")
    expected = first["msg"].removeprefix("Input should be ")
    return f"{first['loc'][0]} is {first['input']!s}, but should be {expected}"
