"""Attack clients' updates: `python attack.py run --config configs/attack/demo_digits.yaml`."""

from __future__ import annotations

from lit_recon.cli import attack

if __name__ == "__main__":
    raise SystemExit(attack())
