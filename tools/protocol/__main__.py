"""``python -m tools.protocol``: see ``tools.protocol.report``."""

import sys

from tools.protocol.report import main

if __name__ == "__main__":
    sys.exit(main())
