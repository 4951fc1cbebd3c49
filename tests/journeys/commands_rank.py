"""One process of a group: several commands one after the other.

The one argument is a JSON file of `[script, arguments]`, such as `["train", ["shadows", "--seed", "1"]]`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lit_recon import cli

if __name__ == "__main__":
    for script, arguments in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        code = getattr(cli, script)(arguments)
        if code:
            sys.exit(code)
