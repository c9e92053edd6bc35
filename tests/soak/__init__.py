"""A soak test: every mode is stepped while a seeded adversary disturbs it, and every transition is checked."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # of the modules beside it, for `python -m tests.soak`
