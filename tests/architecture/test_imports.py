"""The cost of imports: of the package itself, of an attack, and of a command.

The direction of imports between rooms is checked by import-linter (pyproject.toml).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_python(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120).stdout


def loaded(statement: str, *packages: str) -> set[str]:
    """Those of `packages` that are imported once `statement` has run."""
    return set(run_python(f"import sys\n{statement}\nprint(*sys.modules)").split()) & set(packages)


def test_importing_the_package_is_cheap() -> None:
    assert not loaded("import lit_recon", "torch", "numpy", "scipy", "matplotlib", "pytorch_lightning")


def test_an_attack_needs_no_framework_around_it() -> None:
    statement = "import lit_recon.attacks.updates, lit_recon.models, lit_recon.clients"
    frameworks = ("lightning_fabric", "lpips", "matplotlib", "pytorch_lightning", "sklearn", "torchmetrics", "wandb")
    assert not loaded(statement, *frameworks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "limit"), [("lit_recon.experiments.glm.run", 80), ("lit_recon.experiments.update_attack.run", 140)]
)
def test_a_command_loads_few_modules(command: str, limit: int) -> None:
    modules = run_python(f"import sys\nfrom {command} import parser\nparser('x')\nprint(*sys.modules)").split()
    ours = [module for module in modules if module.partition(".")[0] == "lit_recon"]
    assert command in ours
    assert len(ours) < limit
