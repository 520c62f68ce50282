"""Puts the scripts of benchmarks/ where they find each other, as when one of them is run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
