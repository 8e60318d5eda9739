"""Lets every test import the helpers beside this file (``import tiny_models``)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
