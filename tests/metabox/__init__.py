"""MetaBox's own trainers, with its own parallel environment and with ours: the weights they learn are compared."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # of the modules beside it, for `python -m tests.metabox`
