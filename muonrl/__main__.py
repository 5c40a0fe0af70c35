"""``python -m muonrl``."""

import sys

from muonrl.cli import main

sys.exit(main())
