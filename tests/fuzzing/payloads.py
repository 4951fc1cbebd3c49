"""Contents that would show if a reader ran them, or a page did not escape them."""

from __future__ import annotations

import io
import os
import pickle
import tempfile
from pathlib import Path

#: A file that exists once code from an input has run.
CANARY = Path(tempfile.gettempdir()) / f"lit_recon-fuzzing-{os.getpid()}-ran"


class _Touch:
    """Makes the file when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return open, (str(CANARY), "w")


def harmful_pickle(protocol: int = 2) -> bytes:
    """A pickle that makes the file when it is loaded."""
    buffer = io.BytesIO()
    pickle.Pickler(buffer, protocol).dump({"weight": _Touch()})
    return buffer.getvalue()


#: Python that makes the file, for places where text might be evaluated.
HARMFUL_TEXT = f"__import__('pathlib').Path({str(CANARY)!r}).touch()"
#: YAML whose tags would call a function.
HARMFUL_YAML = (
    f"!!python/object/apply:os.system ['touch {CANARY}']",
    f"!!python/object/new:os.system ['touch {CANARY}']",
    f"!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{CANARY}]]",
    "!!python/name:os.system",
    "!!python/module:antigravity",
)
#: Markup that a page must not hold unescaped; each has a mark by which it is found.
MARK = "fuzzed-mark"
SCRIPTS = (
    f"<script>{MARK}</script>",
    f'"><img src=x onerror={MARK}>',
    f"'><svg/onload={MARK}>",
    f"</style><script>{MARK}</script>",
    f"</title><script>{MARK}//",
    f"{{{{ '{MARK}' * 2 }}}}{{% raw %}}",
    f"javascript:{MARK}",
)
