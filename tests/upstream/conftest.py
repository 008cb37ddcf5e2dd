"""The runner of upstream's tests, on small trees."""

import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO / "ci"), str(REPO / "scripts")]
