"""Makes the package importable where it is not installed, as in a plain checkout."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("reflex_protocol") is None:
    sys.path.insert(0, str(Path(__file__).parent.parent))
