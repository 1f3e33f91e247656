"""Write the example's training text from the language reference that every Python carries.

    python -m tools.make_text examples/data/python-topics.txt

The text is what `help("topics")` prints, in alphabetical order of its topics. Its words depend on
the Python that runs this script; the file in the repository came from the version its README names.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics


def text() -> str:
    """Return all topics as one text, each ended by one empty line."""
    return "\n".join(topics[name].strip() + "\n" for name in sorted(topics))


def main() -> None:
    """Write the text to the path on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    output: Path = parser.parse_args().output
    output.write_text(text(), encoding="utf-8")
    print(f"{output}: {output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
