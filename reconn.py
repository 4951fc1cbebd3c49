"""Attack released models: `python reconn.py run --config configs/reconn/digits_demo.yaml`."""

from __future__ import annotations

from lit_recon.cli import reconn

if __name__ == "__main__":
    raise SystemExit(reconn())
