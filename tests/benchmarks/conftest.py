from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.gpu.plan import Plan


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """A rehearsal on the CPU with a minute left."""
    return Plan(device="cpu", quick=True, out=tmp_path, deadline=time.time() + 60)
