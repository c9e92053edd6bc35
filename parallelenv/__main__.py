"""``python -m parallelenv``, the same as the command ``parallelenv``."""

import sys

from parallelenv.cli import main

sys.exit(main())
