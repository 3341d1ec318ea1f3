"""Data sets that a machine may lack, and the marks that skip the tests which need them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# read on import, before the fixture `own_cache` removes HEMOFED_DATA from the environment
_DATA_FOLDERS = (os.environ.get("HEMOFED_DATA"), Path(__file__).parents[3] / "shared" / "data")
REAL_CELLS = next((Path(p) for p in _DATA_FOLDERS if p and (Path(p) / "chula_rbc12.npz").is_file()), None)
needs_real_cells = pytest.mark.skipif(
    REAL_CELLS is None, reason="chula_rbc12.npz is neither in HEMOFED_DATA nor in ../shared/data: name its folder there"
)
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
needs_fashion_mnist = pytest.mark.skipif(
    not FASHION_MNIST.is_dir(), reason="Fashion-MNIST is not installed: apt-get install dataset-fashion-mnist"
)
