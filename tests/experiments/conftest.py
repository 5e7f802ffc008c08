"""`experiments` is no installed package: the repository's root goes on the path, as `python -m`
puts it there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
