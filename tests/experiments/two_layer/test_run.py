"""Two-layer studies from the command line: cells, resumption, the page, and whether bounds hold."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_recon.attacks.updates.features.exact import ExactRecovery
from lit_recon.attacks.updates.features.moments import MomentRecovery
from lit_recon.bounds import autograd_jacobian
from lit_recon.cli import attack
from lit_recon.defenses import DPSGD
from lit_recon.errors import ConfigError
from lit_recon.experiments.configuration import settings_of
from lit_recon.experiments.two_layer import run as command
from lit_recon.experiments.two_layer.cell import drawn_instance, local_update, measured, root_error
from lit_recon.experiments.two_layer.results import Study
from lit_recon.experiments.two_layer.settings import (
    Sizes,
    Sweeps,
    TwoLayerAttack,
    TwoLayerCell,
    TwoLayerDefense,
    TwoLayerSettings,
)

ROOT = Path(__file__).parents[3]
CONTENT: dict[str, Any] = {
    "name": "tiny",
    "base": {"d": 4, "m": 200, "batch": 1, "noise": 0.01},
    "sweeps": {"m": [100, 200]},
    "defenses": {
        "clip": {
            "rate": "clipping",
            "defense": {"class_path": "GradientClipping"},
            "relative": True,
            "values": [0.5, 0.1],
        },
        "dp": {
            "rate": "dp_sgd",
            "defense": {"class_path": "DPSGD", "init_args": {"noise_multiplier": 0.01}},
            "relative": True,
            "values": [0.5],
        },
        "dropout": {"rate": "dropout", "defense": {"class_path": "GradientDropout"}, "values": [0.2], "at": 0.2},
        "local": {"rate": "local_steps", "values": [2]},
    },
    "attacks": {
        "exact": {
            "recovery": {"class_path": "ExactRecovery", "init_args": {"starts": ["moments"], "iterations": 15}},
            "released": "head",
        },
        "tensor": {"recovery": {"class_path": "MomentRecovery"}, "at_most": 400},
    },
    "repeats": 2,
    "wandb": {"mode": "disabled"},
}


def write(path: Path, **changes: Any) -> Path:
    path.write_text(yaml.safe_dump({**CONTENT, **changes}, sort_keys=False))
    return path


def finished(folder: Path) -> dict[str, int]:
    """When every finished cell was finished."""
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("cells/*/cell.json")}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of which all but three cells failed, and were tried again."""
    place = tmp_path_factory.mktemp("study")
    config, folder = write(place / "tiny.yaml"), place / "runs"
    seen: list[str] = []

    def stopping(settings: TwoLayerSettings, cell: TwoLayerCell) -> dict[str, Any]:
        if len(seen) == 3:
            raise ConfigError("no memory left")
        seen.append(cell.name)
        return measured(settings, cell)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "measured", stopping)
        assert attack(["bounds", "--config", str(config), "--out", str(folder)]) == 2
    before = finished(folder)
    assert sorted(before) == sorted(seen)
    assert not (folder / "report.html").exists()
    assert attack(["bounds", "--config", str(config), "--out", str(folder)]) == 0
    after = finished(folder)
    assert len(after) == 8
    assert {name: after[name] for name in before} == before
    return folder


def test_a_study_leaves_a_page_a_table_and_figures(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (study / "report.html").read_text()
    for words in ("Orders and measured exponents", "s √(d/m)", "differential privacy", "van Trees", "dropout 0.2"):
        assert words in page
    rows = list(csv.DictReader((study / "bounds.csv").read_text().splitlines()))
    assert len(rows) == 16
    assert {row["error_likelihood"] == "" for row in rows if row["defense"] in ("clip", "dp", "local")} == {True}
    figures = json.loads((study / "metrics.json").read_text())
    assert figures["n_cells"] == 8
    assert "error_tensor.none.d4.m200.B1.s0.01" not in figures  # too large for `at_most`
    assert figures["error_tensor.none.d4.m100.B1.s0.01"] > 0
    assert {path.name for path in (study / "figures").iterdir()} == {"rates.svg", "rates.png", "defenses.svg"}
    assert attack(["report", str(study)]) == 0
    assert (study / "report.html").read_text().count("<tr>") == page.count("<tr>")


def test_no_attack_of_the_study_lies_below_its_bound(study: Path) -> None:
    found = Study.read(study)
    assert found.compared() >= 6
    assert found.below() == []
    ratio = found.ratio("likelihood", found.cells)
    assert ratio is not None
    assert 0.5 < ratio < 1.6  # measured 0.9; two draws of four coordinates each
    for cell in found.cells:
        assert cell.van_trees < 1.001
        assert cell.bound("relaxed") <= cell.bound("exact") * (1 + 1e-9)


def test_a_finished_study_is_not_touched_but_grows(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(tmp_path / "tiny.yaml")
    assert attack(["bounds", "--config", str(config), "--out", str(study)]) == 2
    assert "holds a finished run" in capsys.readouterr().err
    grown = {"dropout": {**CONTENT["defenses"]["dropout"], "values": [0.2, 0.5]}}
    config = write(tmp_path / "grown.yaml", defenses={**CONTENT["defenses"], **grown})
    assert attack(["bounds", "--config", str(config), "--out", str(study), "--name", "tiny"]) == 0
    assert "9 runs, 8 of them done; 2 draws in each" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("defense", "strength", "words"),
    [
        ("MixUp", 2.0, "no bound is known for MixUp(alpha="),
        ("SVTPrivacy", 0.9, "no bound is known for SVTPrivacy(fraction=0.5"),
        ("GradientDropout", 2.0, "needs rate in [0, 1]; got 2"),
    ],
)
def test_defenses_without_a_bound_are_refused_at_once(
    defense: str, strength: float, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = {"defense": {"class_path": defense}, "values": [0.5, strength], "relative": defense == "MixUp"}
    config = write(tmp_path / "tiny.yaml", defenses={**CONTENT["defenses"], "last": last})
    assert attack(["bounds", "--config", str(config), "--out", str(tmp_path / "runs")]) == 2
    message = capsys.readouterr().err
    assert "defenses.last at " in message
    assert words in message
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Sizes(batch=33), "1 <= batch <= d"),
        (lambda: Sizes(noise=0.0), "noise above 0"),
        (lambda: TwoLayerDefense([]), "strengths above 0"),
        (lambda: TwoLayerDefense([2.0], at=3.0), "`at` must be one of"),
        (lambda: TwoLayerDefense([2.0], rate="magic"), "rate must be one of"),
        (lambda: TwoLayerDefense([0.5]), "local steps must be integers"),
        (lambda: TwoLayerSettings(attacks={}), "at least one attack"),
        (lambda: settings(defenses={"none": TwoLayerDefense([2.0])}), "always part"),
        (lambda: settings(delta=0.0), "delta must be strictly between"),
        (lambda: settings(sweeps=Sweeps()), "needs a size to vary"),
    ],
)
def test_settings_are_checked(build: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build()


def settings(**changes: Any) -> TwoLayerSettings:
    given: dict[str, Any] = {"attacks": {"t": TwoLayerAttack(MomentRecovery())}, "sweeps": Sweeps(d=[4]), **changes}
    return TwoLayerSettings(**given)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "bounds").glob("*.yaml")), ids=lambda path: path.stem)
def test_configurations_build(path: Path) -> None:
    parser = command.parser("attack.py bounds")
    built = settings_of(TwoLayerSettings, vars(parser.instantiate(parser.parse_args(["--config", str(path)]))))
    assert isinstance(next(iter(built.attacks.values())).recovery, MomentRecovery | ExactRecovery)


def test_local_steps_of_no_length_are_one_gradient() -> None:
    instance = drawn_instance(
        settings(loss="cross_entropy"), TwoLayerCell(Sizes(d=4, m=30)), torch.Generator().manual_seed(0)
    )
    one = instance.net.update(instance.inputs, instance.targets)
    still = local_update(instance, 3, 1e-12)(instance.inputs)
    moved = local_update(instance, 3, 0.05)(instance.inputs)
    assert all(torch.allclose(still[name], value, rtol=1e-6) for name, value in one.items())
    assert not any(torch.allclose(moved[name], value, rtol=1e-3) for name, value in one.items())
    assert autograd_jacobian(local_update(instance, 2, 0.05), instance.inputs).n_inputs == 8


def test_clipping_of_no_example_leaves_the_bound() -> None:
    study, sizes = settings(defenses={"dp": TwoLayerDefense([1e6], DPSGD)}, repeats=2), Sizes(d=6, m=60, batch=4)
    cells = [TwoLayerCell(sizes, digest="1"), TwoLayerCell(sizes, "dp", 1e6, digest="1")]
    plain, behind = (measured(study, cell)["bounds"]["exact"] for cell in cells)
    assert behind == pytest.approx(plain, rel=1e-6)


def test_errors_are_up_to_order_and_sign_and_count_what_is_missing() -> None:
    truth = torch.eye(3, dtype=torch.float64)[:2]
    assert root_error(-truth.flip(0), truth) == 0.0
    assert root_error(truth[:1], truth) == pytest.approx(0.5**0.5)
