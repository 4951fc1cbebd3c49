"""An attack, a defense, a model and a metric that are defined here, outside the package, work like those inside it."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import lit_recon
from lit_recon.attacks.base import Attack
from lit_recon.data.sources import Digits
from lit_recon.defenses import Defense
from lit_recon.defenses.base import Round
from lit_recon.experiments.update_attack import run
from lit_recon.metrics import Measure, Metric
from lit_recon.records import Normalization, Observation, Reconstruction, Update


class Ratio(Attack):
    """The gradient of a neuron's weights divided by that of its bias is the input of the neuron."""

    def run(self, observations: Sequence[Observation]) -> list[Reconstruction]:
        found = []
        for seen in observations:
            weight, bias, *_, head = seen.update.values()
            row = bias.abs().argmax()
            mean, std = seen.normalization.tensors(weight)
            image = (weight[row] / bias[row]).view(1, *seen.image_shape) * std + mean
            found.append(Reconstruction(image, head.argmin().view(1), float(bias[row])))
        return found


class Rounding(Defense):
    """Rounds the update to multiples of a step, as a client that saves bandwidth would."""

    def __init__(self, step: float = 0.05) -> None:
        self.step = step

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        return {name: self.step * (value / self.step).round() for name, value in update.items()}


class TwoLayers(nn.Module):
    """A fully connected layer behind a smooth activation, and a head: nothing of this package."""

    def __init__(self, n_classes: int = 10) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 32), nn.Linear(32, n_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(nn.functional.gelu(self.hidden(images.flatten(1))))


class Brightness(Metric):
    """Difference of the mean pixel of two images."""

    measure = Measure("brightness", "Brightness error", higher_is_better=False, decimals=5, unit="gray")

    def __call__(self, found: Tensor, truth: Tensor) -> Tensor:
        return (found.mean(dim=(1, 2, 3)) - truth.mean(dim=(1, 2, 3))).abs()


def check(folder: Path, n: int) -> None:
    """The metric is in the table of images, in the record, and on the page with its own name and digits."""
    with (folder / "victims.csv").open() as file:
        values = [float(row["brightness"]) for row in csv.DictReader(file)]
    metrics = json.loads((folder / "metrics.json").read_text())
    assert len(values) == n
    assert metrics["brightness"] == pytest.approx(sum(values) / n)
    assert metrics["brightness_low"] <= metrics["brightness"] <= metrics["brightness_high"]
    page = (folder / "report.html").read_text()
    assert "Brightness error\N{NO-BREAK SPACE}↓" in page
    shown = f"{metrics['brightness']:.5f}"
    assert f"{shown}\N{NO-BREAK SPACE}gray" in page
    assert "Rounding(step=" in page


def test_from_python(tmp_path: Path) -> None:
    public, test = Digits().load()
    ids = torch.arange(6)
    torch.manual_seed(0)
    model, known = TwoLayers(test.n_classes), (test.image_shape, Normalization((0.5,), (0.25,)))
    images, labels = test.pixels(ids), test.labels[ids]
    plain = lit_recon.Client(model, image_shape=known[0], normalization=known[1])
    exact = lit_recon.evaluate(Ratio(), plain, images, labels, ["psnr", Brightness], public.images)
    assert exact.scores["rmse"].max() < 1e-5
    client = lit_recon.Client(model, image_shape=known[0], normalization=known[1], defense=Rounding())
    result = lit_recon.evaluate(Ratio(), client, images, labels, ["rmse", Brightness()], public.images)
    assert result.scores["brightness"].mean() > exact.scores["brightness"].mean()
    assert "Brightness error ↓" in str(result)
    result.save(tmp_path / "run")
    check(tmp_path / "run", 6)


def test_from_the_command_line(attack: Callable[..., Any], workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[list[str]] = []
    monkeypatch.setattr(run, "log_table", lambda loggers, key, columns, rows: tables.append(columns))
    settings = {
        "data": "Digits",
        "model": {"class_path": f"{__name__}.TwoLayers", "init_args": {"n_classes": 10}},
        "attack": {"class_path": f"{__name__}.Ratio"},
        "defense": {"class_path": f"{__name__}.Rounding", "init_args": {"step": 0.04}},
        "metrics": ["rmse", f"{__name__}.Brightness"],
        "victims": {"n": 4},
    }
    (workplace / "newcomer.yaml").write_text(yaml.safe_dump(settings))
    ended = attack("run", "--config", "newcomer.yaml")
    assert ended.code == 0, ended.err
    folder = workplace / "runs" / "newcomer"
    check(folder, 4)
    assert "brightness" in tables[0]  # on W&B
    assert "brightness_high" in next(folder.glob("logs/**/metrics.csv")).read_text()  # of every logger
    both = attack("report", folder, folder, "--out", "both.html")
    assert both.code == 0, both.err
    assert "Brightness error" in (workplace / "both.html").read_text()


def test_a_metric_that_cannot_be_built_is_refused(attack: Callable[..., Any], small: list[str]) -> None:
    ended = attack(*small, "--metrics", "[rmse,nowhere.Blur]", "--out", "runs/refused")
    assert (ended.code, ended.out) == (2, "")
    assert "there is no metric nowhere.Blur" in ended.err
