"""A finished evaluation of two defenses, and one with bounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from lit_recon.attacks.updates import GradientMatching
from lit_recon.bounds.fisher import check_size
from lit_recon.defenses import Defense
from lit_recon.experiments.evaluate import bounds as command
from lit_recon.experiments.evaluate.grid import GridCell
from lit_recon.experiments.settings import VictimSettings
from lit_recon.experiments.update_attack.bound import WITHOUT_NOISE
from lit_recon.models import MLP, Backbone
from lit_recon.records import Normalization
from lit_recon.reporting.pages import TableCell
from lit_recon.reporting.record import read_victims
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import write_metrics, write_victims

NEAREST = 0.2
ONE_CHANNEL = Normalization((0.5,), (0.5,))
WHY = WITHOUT_NOISE


#: Errors of a mean on each side of it in a 95 % interval from two batches, by Student's t.
QUANTILE = 12.706204736174698


#: RMSE by (defense, strength) of two attacks; None: the cell failed.
LEAKAGE: dict[tuple[str, float | None], tuple[float | None, float | None]] = {
    ("none", None): (0.05, 0.04),
    ("prune", 0.5): (0.06, 0.09),
    ("prune", 0.99): (0.25, 0.30),
    ("noise", 0.1): (0.15, None),
    ("noise", 1.0): (0.19, 0.31),
}


ACCURACY = {("none", None): 0.9, ("prune", 0.5): 0.9, ("prune", 0.99): 0.8, ("noise", 0.1): 0.88, ("noise", 1.0): None}


@pytest.fixture
def evaluated(tmp_path: Path, make_run: Callable[..., RunFolder]) -> RunFolder:
    """A grid of two defenses and two attacks at batch size 2, one cell of which failed."""
    folder = RunFolder.open(tmp_path / "grid", yaml.safe_dump({"name": "two_defenses", "paper": {"citation": "Some"}}))
    cells: list[dict[str, Any]] = []
    for (defense, strength), accuracy in ACCURACY.items():
        place = f"utility/{defense}_{strength}-0123abcd"
        run = RunFolder.open(folder.path / place, "seed: 0")
        write_metrics(run, {"accuracy": accuracy, "accuracy_reason": "diverged", "final_train_loss": 0.5})
        cells.append(entry("utility", place, defense, strength))
    for (defense, strength), figures in LEAKAGE.items():
        for attack, rmse in zip(("near", "far"), figures, strict=True):
            place = f"cells/{defense}_{strength}-{attack}-b2-0123abcd"
            if rmse is None:
                folder.failure(place).parent.mkdir(exist_ok=True)
                folder.failure(place).write_text(json.dumps({"reason": "out of memory", "traceback": ""}))
            else:
                # the standard deviation over the root of the images would be 0.02
                metrics = {"rmse": rmse, "rmse_std": 0.04, "baseline_nearest_public_rmse": NEAREST}
                metrics |= {"rmse_low": rmse - 0.03 * QUANTILE, "rmse_high": rmse + 0.03 * QUANTILE}
                metrics |= {"psnr_low": 21.46 - 0.9 * QUANTILE, "psnr_high": 21.46 + 0.9 * QUANTILE}
                run = make_run(f"grid/{place}", metrics=metrics)
                rows = read_victims(run.victims)  # of two batches, whose means are 0.03 from that of all
                for row in rows:
                    row.scores["rmse"] = rmse + (0.03 if row.batch else -0.03)
                write_victims(run, rows)
            paper = 0.26 if (defense, strength, attack) == ("prune", 0.99, "near") else None
            cells.append(entry("attack", place, defense, strength, attack, 2, paper))
    content = {
        "cells": cells,
        "attacks": {"near": "Near", "far": "Far"},
        "max_accuracy_drops": [0.02, 0.2],
        "malicious": ["far"],
    }
    folder.grid.write_text(json.dumps({**content, "defenses": {"prune": "pruning", "noise": "noise"}}))
    return folder


def texts(row: Sequence[str | TableCell]) -> list[str]:
    return [cell if isinstance(cell, str) else cell.text for cell in row]


def marks(row: Sequence[str | TableCell]) -> list[str]:
    return ["" if isinstance(cell, str) else cell.mark for cell in row]


def entry(
    kind: str, place: str, defense: str, strength: float | None, attack: str = "", size: int = 0, paper: Any = None
) -> dict[str, Any]:
    aware = None if strength is None else True
    return {"kind": kind, "folder": place, "defense": defense, "strength": strength, "attack": attack} | {
        "aware": aware,
        "batch_size": size,
        "paper": paper,
    }


def change(folder: RunFolder, **content: Any) -> None:
    folder.grid.write_text(json.dumps({**json.loads(folder.grid.read_text()), **content}))


def rescore(
    folder: RunFolder,
    defense: str,
    strength: float | None,
    attack: str,
    value: float,
    key: str = "rmse",
    nearest: float | None = None,
) -> None:
    run = folder.path / f"cells/{defense}_{strength}-{attack}-b2-0123abcd"
    metrics = json.loads((run / "metrics.json").read_text())
    beside = {} if nearest is None else {f"baseline_nearest_public_{key}": nearest}
    write_metrics(RunFolder(run), {**metrics, key: value, **beside})


@pytest.fixture
def bounded(tmp_path: Path, make_run: Callable[..., RunFolder]) -> RunFolder:
    """No defense, whose bound is 0, and noise at two strengths, one of them without a bound for unbiased attacks."""
    folder = RunFolder.open(tmp_path / "grid", yaml.safe_dump({"name": "bounded"}))
    cells: list[dict[str, Any]] = []
    for defense, strength in (("none", None), ("noise", 0.1), ("noise", 1.0)):
        place = f"cells/{defense}_{strength}-near-b2-0123abcd"
        make_run(f"grid/{place}", metrics={"rmse": 0.1, "mse": 0.04, "baseline_nearest_public_rmse": 0.2})
        identity = {"kind": "attack", "folder": place, "defense": defense, "strength": strength, "attack": "near"}
        cells.append({**identity, "aware": strength and True, "batch_size": 2, "paper": None})
    names = {"attacks": {"near": "Near"}, "defenses": {"noise": "noise"}, "max_accuracy_drops": [], "malicious": []}
    folder.grid.write_text(json.dumps({"cells": cells, **names}))
    found = [{"reason": WHY}, {"rmse": 0.123, "unbiased_rmse": 2.5}, {"rmse": 0.25, "unbiased_rmse": None}]
    folder.bounds.write_text(json.dumps({c["folder"]: bound for c, bound in zip(cells, found, strict=True)}))
    return folder


@pytest.fixture
def cell(bounded: RunFolder, monkeypatch: pytest.MonkeyPatch) -> GridCell:
    """The finished cell with the weaker noise, whose bound is not known yet."""
    entry = json.loads(bounded.grid.read_text())["cells"][1]
    bounded.bounds.unlink()
    monkeypatch.setattr(GridCell, "built", lambda *_: {})
    monkeypatch.setattr(command, "AttackSettings", lambda **_: SimpleNamespace(defense=None))
    return GridCell(settings={}, **{**entry, "aware": True})


@pytest.fixture
def too_large(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Cells of a network whose Jacobian counts as too large, and their defense's settings."""
    from lit_recon.data import Digits

    monkeypatch.setattr(command, "check_size", partial(check_size, largest=10))
    torch.manual_seed(0)
    target = SimpleNamespace(model=Backbone(MLP((1, 8, 8), (12,)), 10, ONE_CHANNEL).eval())
    target.trained = lambda _: target
    monkeypatch.setattr(command, "find_target", lambda *_: target)
    monkeypatch.setattr(command, "sent_out", lambda _, model, __: model)
    victims = VictimSettings(n=4, batch_size=2)

    def cell(defense: Defense, attack: str = "one") -> Any:
        built = {"attack": GradientMatching(), "defense": defense, "victims": victims, "data": Digits(), "name": "x"}
        folder = f"{attack}-{defense!r}"
        return SimpleNamespace(kind="attack", folder=folder, network="one", settings={}, built=lambda _: built)

    return cell
