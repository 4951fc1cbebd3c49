"""Whether freed memory goes back to the system, which on a CPU costs a tenth of an attack's time.

An iteration frees about 100 MiB of gradients. Where glibc hands them back and takes them again, each iteration pays
for tens of thousands of page faults, and how often that happens depends on what else lies on the heap: two forms of
the same computation then differ by more than what is measured.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: The largest values that glibc takes: an `int`, and half of an arena's heap.
_TRIM_BYTES, _MMAP_BYTES = 2**31 - 1, 2**25


def keep_freed_memory() -> bool:
    """Let this process keep what it frees; whether the C library can be told so (glibc can)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_MMAP_THRESHOLD, _MMAP_BYTES), (_M_TRIM_THRESHOLD, _TRIM_BYTES))
    return all(bool(mallopt(setting, size)) for setting, size in settings)
