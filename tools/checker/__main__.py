"""Checks compiled programs: ``python -m tools.checker FILE.zir…``.

Exits with 0 if all are valid, with 1 on findings, and with 2 if a file is no program.
"""

from __future__ import annotations

import argparse
import sys

from tools.checker.check import findings
from tools.checker.reading import NoProgramError, read_file


def main() -> int:
    """Check each file and print one line for each finding."""
    parser = argparse.ArgumentParser(description="Check compiled programs.")
    parser.add_argument("files", nargs="+")
    code = 0
    for path in parser.parse_args().files:
        try:
            found = findings(read_file(path, with_dims=True))
        except NoProgramError as error:
            print(error, file=sys.stderr)
            code = 2
            continue
        for text in found or ["ok"]:
            print(f"{path}: {text}")
        code = max(code, 1 if found else 0)
    return code


if __name__ == "__main__":
    sys.exit(main())
