"""The text of a program: canonical printing, and parsing with a caret under each error.

The laws are ``parse(print_program(p)) == p`` and that printing is canonical, so an ordinary unified diff of two texts
is a readable diff of two programs. The grammar is in ``docs/ir.md``.
"""

from __future__ import annotations

from zeroir.ir.text.parser import parse
from zeroir.ir.text.printer import print_op, print_program, print_section, print_segment
from zeroir.ir.text.scanner import ParseError

__all__ = ["ParseError", "parse", "print_op", "print_program", "print_section", "print_segment"]
