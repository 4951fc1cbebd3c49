"""The cure for a torchvision whose operators do not load acts there, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Fails as torchvision does when its extension did not load, for the same reason.
BROKEN = """
import torch
import torchvision.datasets

@torch.library.register_fake("torchvision::nms")
def fake_nms(dets, scores, iou_threshold): ...

@torch.library.register_fake("torchvision::qnms")
def fake_qnms(dets, scores, iou_threshold): ...
"""


def run_python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter that finds packages in `path` first."""
    search = os.pathsep.join([*map(str, path), str(Path(__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": search}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)


@pytest.fixture
def fake_torchvision(tmp_path: Path):
    """Write a package that answers to the name of torchvision; returns the folder to search first."""

    def write(init: str) -> Path:
        package = tmp_path / "torchvision"
        package.mkdir()
        (package / "__init__.py").write_text(init)
        (package / "datasets.py").write_text("import torchvision\n")
        return tmp_path

    return write


def test_packages_that_import_torchvision_work_after_the_cure() -> None:
    """In this process, whose first import of any of them was that of the cure, in conftest.py."""
    import lpips
    import pytorch_lightning
    import torchmetrics.image
    from torchvision import datasets, models, transforms

    assert lpips.pretrained_networks.tv is models
    assert all((pytorch_lightning, torchmetrics.image, datasets, transforms))


@pytest.mark.processes
def test_missing_operators_are_declared_once_and_have_no_kernel(fake_torchvision) -> None:
    done = run_python(
        "from lit_recon import _torchvision\n"
        "import torch, torchvision\n"
        "assert len(_torchvision._declarations) == 1\n"
        "assert _torchvision.import_torchvision() is torchvision\n"
        "assert torchvision.datasets.torchvision is torchvision, 'a half-imported module survived'\n"
        "assert len(_torchvision._declarations) == 1\n"
        "torch.ops.torchvision.nms, torch.ops.torchvision.qnms\n"
        "print('declared')\n"
        "torch.ops.torchvision.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)\n",
        fake_torchvision(BROKEN),
    )
    assert done.stdout == "declared\n", done.stderr
    assert done.returncode == 1
    assert "torchvision::nms" in done.stderr


def test_a_torchvision_that_loads_is_left_untouched(fake_torchvision) -> None:
    done = run_python(
        "import sys\n"
        "import torchvision\n"
        "before = dict(sys.modules)\n"
        "from lit_recon import _torchvision\n"
        "assert _torchvision._declarations == []\n"
        "assert sys.modules['torchvision'] is before['torchvision']\n"
        "assert sys.modules['torchvision.datasets'] is before['torchvision.datasets']\n"
        "assert 'torch' not in sys.modules\n",
        fake_torchvision("import torchvision.datasets"),
    )
    assert done.returncode == 0, done.stderr


def test_other_failures_are_not_hidden(fake_torchvision) -> None:
    done = run_python("import lit_recon._torchvision", fake_torchvision("raise RuntimeError('out of luck')"))
    assert done.returncode == 1
    assert "RuntimeError: out of luck" in done.stderr


def test_absent_torchvision_matters_only_to_who_asks() -> None:
    done = run_python(
        "import sys\n"
        "sys.modules['torchvision'] = None\n"
        "from lit_recon import _torchvision\n"
        "try:\n"
        "    _torchvision.import_torchvision()\n"
        "except ModuleNotFoundError:\n"
        "    print('asked')\n"
    )
    assert done.stdout == "asked\n", done.stderr
