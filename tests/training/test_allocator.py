from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tests.processes import Script, outputs

#: Blocks that are freed together, as the gradients of an iteration are; faults of the rounds after the first.
FAULTS = """
import resource
from lit_recon.training.trainer import keep_freed_memory
assert keep_freed_memory()

def allocate():
    blocks = [bytearray(4 * 2**20) for _ in range(20)]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

allocate()
before = faults()
for _ in range(5):
    allocate()
print(faults() - before)
"""


@pytest.mark.processes
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_freed_memory_is_used_again_without_page_faults(tmp_path: Path) -> None:
    script = tmp_path / "faults.py"
    script.write_text(FAULTS)
    assert int(*outputs([Script(script)])) < 1000, "80 MiB are 20,000 pages"
