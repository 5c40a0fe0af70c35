"""`python -m benchmarks`: run, compare, audit, estimate. Start it in the root of the repository."""

from __future__ import annotations

import sys

from benchmarks.cli import main

if __name__ == "__main__":
    sys.exit(main())
