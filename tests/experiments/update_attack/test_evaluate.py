"""An attack scored from Python: its result, and the run folder that it saves."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import load_file
from scipy.stats import t
from torch import Tensor

import lit_recon
from lit_recon.attacks.base import Attack
from lit_recon.attacks.updates import GenerativePrior, GradientMatching, KnownLabels, TotalVariation
from lit_recon.clients import Client, ClientSettings, LocalTraining
from lit_recon.data.dataset import fingerprints
from lit_recon.defenses import Defense, ExcludedVariables, GaussianNoise
from lit_recon.errors import ConfigError, LitReconError, RunExistsError, ShapeError
from lit_recon.experiments.configuration import instantiated
from lit_recon.experiments.update_attack.evaluate import evaluate
from lit_recon.experiments.update_attack.run import parser
from lit_recon.experiments.update_attack.score import frozen_notes
from lit_recon.metrics import PerceptualDistance, rmse
from lit_recon.models import MLP, Backbone, WideFeatureLayer
from lit_recon.models.generative.generator import ConvGenerator, GeneratorCheckpoint, save_generator
from lit_recon.records import Knowledge, Normalization, Observation, Reconstruction
from lit_recon.reporting.run_folder import RunFolder

SHAPE = (1, 8, 8)
METRICS = ("mse", "rmse", "psnr", "ssim", "label_accuracy")


class Shifted(Attack):
    """Returns the images that it was told, in reverse order and darker by 0.1: the truth, to test the scoring."""

    def __init__(
        self, images: Tensor, labels: Tensor, notes: tuple[str, ...] = (), certified: Sequence[bool] | None = None
    ) -> None:
        self.batches = list(zip(images, labels, strict=True))
        self.notes, self.certified = notes, certified

    def run(self, observations: Sequence[Observation]) -> list[Reconstruction]:
        found = []
        for seen in observations:
            taken, self.batches = self.batches[: seen.n_examples], self.batches[seen.n_examples :]
            images, labels = (torch.stack(part).flip(0) for part in zip(*taken, strict=True))
            curve = {"step": [0.0], "loss": [0.5]}
            certified = None if self.certified is None else torch.tensor(self.certified)
            found.append(Reconstruction(images - 0.1, labels, 0.5, curve, self.notes, certified=certified))
        return found


@pytest.fixture
def model() -> Backbone:
    torch.manual_seed(0)
    return Backbone(MLP(SHAPE, [16], activation="gelu"), 4, Normalization((0.5,), (0.25,)))


def data(n: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Targets, their labels, and public images in bytes."""
    generator = torch.Generator().manual_seed(1)
    images = 0.1 + 0.9 * torch.rand(n, *SHAPE, generator=generator)
    public = torch.randint(256, (9, *SHAPE), generator=generator, dtype=torch.uint8)
    return images, torch.arange(n) % 4, public


def test_a_note_says_that_the_gradient_of_frozen_parameters_was_attacked(model: Backbone) -> None:
    images, labels, _ = data(1)
    names = [name for name, _ in model.trunk.named_parameters(prefix="trunk")]

    def notes(defense: Defense | None = None) -> list[str]:
        client = Client(model, defense=defense)
        return evaluate(Shifted(images, labels), client, images, labels, ["rmse"]).notes

    assert len(notes()) == 1
    model.trunk.requires_grad_(False)
    assert notes()[0].startswith(f"2 of 4 parameters do not require a gradient ({names[0]} is the first), but their")
    assert notes(ExcludedVariables(names[:1]))[0].startswith(
        f"1 of 4 parameters do not require a gradient ({names[1]})"
    )
    assert len(notes(ExcludedVariables(names))) == 1


def test_frozen_neurons_of_a_wide_layer_are_no_mistake() -> None:
    wide = Backbone(MLP(SHAPE, [16]), 4, Normalization((0.5,), (0.25,)), WideFeatureLayer(16, 64, n_trained=8))
    assert not all(value.requires_grad for value in wide.parameters())
    assert frozen_notes(wide, None) == []


def test_images_are_matched_and_scored_and_means_have_intervals_over_batches(model: Backbone) -> None:
    images, labels, public = data()
    result = evaluate(Shifted(images, labels), Client(model), images, labels, METRICS, public, batch_size=2)
    torch.testing.assert_close(result.images, images - 0.1)
    torch.testing.assert_close(result.targets, images)
    assert result.labels.tolist() == result.recovered_labels.tolist() == labels.tolist()
    torch.testing.assert_close(result.scores["rmse"], torch.full((6,), 0.1, dtype=torch.float64))
    assert result.means["rmse"].value == pytest.approx(0.1)
    ssim = result.scores["ssim"].numpy()
    batches = ssim.reshape(3, 2).mean(1)
    half = t.ppf(0.975, 2) * batches.std(ddof=1) / np.sqrt(3)
    assert result.means["ssim"][:4] == pytest.approx(
        (ssim.mean(), ssim.std(ddof=1), batches.mean() - half, batches.mean() + half)
    )
    assert result.means["label_accuracy"] == (1.0, None, None, None, "", None)
    assert result.means["ssim"].error == pytest.approx(batches.std(ddof=1) / np.sqrt(3))
    mean = (public.double() / 255).mean(0).expand(6, -1, -1, -1)
    assert result.baselines["mean_image"]["rmse"] == pytest.approx(float(rmse(mean.float(), images).mean()))
    assert result.baselines.keys() == {"mean_image", "nearest_public"}
    assert [(curve.batch, curve.values["loss"]) for curve in result.curves] == [(0, [0.5]), (1, [0.5]), (2, [0.5])]


def test_a_result_is_printed_as_a_table(model: Backbone) -> None:
    images, labels, public = data()
    noted = Shifted(images, labels, ("It peeked.",))
    metrics = ["psnr", PerceptualDistance("none")]
    lines = repr(evaluate(noted, Client(model), images, labels, metrics, public)).splitlines()
    assert lines[0] == "6 images of 6 clients"
    cells = [re.split("  +", line) for line in lines[1:5]]
    assert cells[0] == ["", "mean", "95 % interval", "mean public image", "nearest public image"]
    assert cells[1][:3] == ["RMSE ↓", "0.100", "0.100 to 0.100"]
    assert cells[2][:2] == ["PSNR ↑", "20.0\N{NO-BREAK SPACE}dB"]
    assert cells[3] == ["LPIPS ↓", "n/a (switched off by lpips.network)"]
    assert lines[5] == "note: It peeked."


def test_printed_intervals_end_where_the_metric_does(model: Backbone) -> None:
    images, labels, _ = data()
    result = evaluate(Shifted(images, labels), Client(model), images, labels, METRICS, batch_size=2)
    ends = {
        "rmse_low": -0.1,
        "ssim_low": 0.2,
        "ssim_high": 1.4,
        "label_accuracy_low": 0.13,
        "label_accuracy_high": 1.37,
    }
    text = repr(replace(result, record={**result.record, **ends}))
    assert "0.000 to 0.100" in text
    assert "0.200 to 1.000" in text
    assert "13 to 100" in text


def test_certificates_stand_beside_the_images_they_are_about(model: Backbone, tmp_path: Path) -> None:
    images, labels, _ = data(6)
    knowing = Shifted(images, labels, certified=(True, False, False))  # of images in reverse order
    result = evaluate(knowing, Client(model), images, labels, METRICS, batch_size=3)
    assert result.certified == [False, False, True] * 2
    assert (result.record["certified_rate"], result.record["n_certified"]) == (pytest.approx(1 / 3), 2)
    assert result.record["certified_rmse"] == pytest.approx(0.1)
    assert repr(result).splitlines()[0] == "6 images of 2 clients, 2 certified"
    assert any("33\N{NO-BREAK SPACE}% of the reconstructions are certified: " in note for note in result.notes)
    page = result.save(tmp_path / "run").read_text()
    with (tmp_path / "run" / "victims.csv").open() as file:
        assert [row["certified"] for row in csv.DictReader(file)] == ["false", "false", "true"] * 2
    assert page.count(">certified</span>") == 2
    silent = evaluate(Shifted(images, labels), Client(model), images, labels, METRICS)
    assert silent.certified == [None] * 6
    assert "certified_rate" not in silent.record
    with (silent.save(tmp_path / "silent").parent / "victims.csv").open() as file:
        assert {row["certified"] for row in csv.DictReader(file)} == {""}


def test_without_public_images_there_are_no_baselines_and_a_note_says_so(model: Backbone, tmp_path: Path) -> None:
    images, labels, _ = data(2)
    result = evaluate(Shifted(images, labels), Client(model), images, labels, METRICS)
    assert result.baselines == {}
    assert result.nearest_public is None
    assert result.notes == ["No public images were given, so that there are no baselines to compare with."]
    page = result.save(tmp_path / "run").read_text()
    assert page.count("<figure>") == 2 * 2
    assert "Nearest public<b>" not in page
    assert "on the right the public image" not in page


def test_a_saved_result_is_a_run_folder_that_is_never_overwritten_in_silence(model: Backbone, tmp_path: Path) -> None:
    images, labels, public = data(4)
    names = ["a", "b", "c", "d"]
    truth = Shifted(images, labels)
    result = evaluate(truth, Client(model), images, labels, METRICS, public, batch_size=2, class_names=names)
    folder = tmp_path / "run"
    assert result.save(folder) == folder / "report.html"
    assert RunFolder(folder).kind == "attack run"
    assert {"config.yaml", "metrics.json", "victims.csv", "reconstructions.safetensors", "report.html"} <= {
        path.name for path in folder.iterdir()
    }
    tensors = load_file(folder / "reconstructions.safetensors")
    np.testing.assert_array_equal(tensors["reconstructions"], result.images.numpy())
    with (folder / "victims.csv").open() as file:
        rows = list(csv.DictReader(file))
    scores = ["rmse", "mse", "psnr", "ssim", "mean_image_rmse", "nearest_public_rmse"]
    assert set(rows[0]) == {"batch", "id", "label", "recovered_label", "certified", "loss", *scores}
    assert [float(row["ssim"]) for row in rows] == result.scores["ssim"].tolist()
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["rmse"] == result.means["rmse"].value
    assert metrics["formats"]["psnr"] == {"name": "PSNR", "higher_is_better": True, "decimals": 1, "unit": "dB"}
    with pytest.raises(RunExistsError, match="holds a finished run, which is left as it is"):
        result.save(folder)
    result.save(folder, overwrite=True)


def test_an_attack_of_ours_gives_the_images_of_the_command_s_client_and_a_configuration_to_repeat_it(
    model: Backbone, tmp_path: Path
) -> None:
    images, labels, public = data(2)
    attack = GradientMatching(
        priors=[TotalVariation(0.01)], labels=KnownLabels(), steps=4, restarts=2, execution="loop", log_every=2
    )
    clients, knowledge = ClientSettings(local_steps=LocalTraining(2, 0.1)), Knowledge(labels=True)
    client = clients.client(model, GaussianNoise(0.001))
    result = evaluate(attack, client, images, labels, METRICS, public, knowledge)
    for index in range(2):
        seen = client.observe(images[index : index + 1], labels[index : index + 1], knowledge, clients.generator(index))
        assert torch.equal(attack(seen).images, result.images[index : index + 1])
    assert len(result.curves) == 4
    page = result.save(tmp_path / "run").read_text()
    assert "result of 2 local steps" in page
    assert "defended by GaussianNoise(std=0.001" in page
    config = tmp_path / "run" / "config.yaml"
    assert "Not in this file, so that the command takes its defaults: the images, the model.\n" in config.read_text()
    settings = yaml.safe_load(config.read_text())
    assert settings["victims"] == {"n": 2, "batch_size": 1}
    command = parser("attack.py run")
    built = instantiated(command, command.parse_args(["--config", str(config)]))
    assert [type(prior).__name__ for prior in built["attack"].priors] == ["TotalVariation"]
    assert (built["attack"].steps, built["attack"].restarts) == (4, 2)
    assert (built["defense"].std, built["knowledge"], built["client"].local_steps.steps) == (0.001, knowledge, 2)


def test_a_client_can_be_moved(model: Backbone) -> None:
    client = Client(model)
    assert client.to("cpu").model is not client.model
    images, labels, _ = data(1)
    ours, theirs = (one.release(images, labels).update for one in (client, client.to("cpu")))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert next(client.to("meta").model.parameters()).device.type == "meta"
    assert next(client.model.parameters()).device.type == "cpu"


@pytest.mark.parametrize(
    ("changes", "error", "complaint"),
    [
        ({"labels": torch.tensor([0])}, ShapeError, "got 2 images, 1 labels"),
        ({"batch_size": 4}, ConfigError, "batch_size must divide the number of images, 2; got 4"),
        ({"images": torch.full((2, *SHAPE), 1.5)}, ShapeError, r"must lie in \[0, 1\]"),
        ({"public": torch.zeros(3, 1, 4, 4)}, ShapeError, r"the shape of the targets, \(1, 8, 8\); got \(1, 4, 4\)"),
        ({"metrics": ["blur"]}, ConfigError, "there is no metric blur"),
        ({"images": np.zeros((2, *SHAPE))}, ConfigError, "images must be Tensor; got a ndarray"),
        ({"labels": [0, 1]}, ConfigError, "labels must be Tensor; got a list"),
        ({"attack": Shifted}, ConfigError, "attack must be Attack; got the class Shifted: give an instance"),
        ({"client": MLP(SHAPE)}, ConfigError, "client must be Client; got a MLP"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_attack(
    changes: dict[str, object], error: type[LitReconError], complaint: str, model: Backbone
) -> None:
    images, labels, _ = data(2)
    unused = Shifted(images, labels)
    arguments = {"attack": unused, "client": Client(model), "images": images, "labels": labels, "metrics": METRICS}
    with pytest.raises(error, match=complaint):
        evaluate(**{**arguments, **changes})  # type: ignore[arg-type]
    assert len(unused.batches) == 2


@pytest.mark.parametrize("as_floats", [False, True])
def test_a_generator_that_was_trained_on_a_target_is_refused(as_floats: bool, model: Backbone, tmp_path: Path) -> None:
    pixels = torch.randint(0, 256, (4, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images, labels, path = pixels.float() / 255 if as_floats else pixels, torch.arange(4), tmp_path / "generator"
    for seen, others in ((pixels[[2]], images[[0, 1, 3]]), (255 - pixels, images)):
        save_generator(path, GeneratorCheckpoint(ConvGenerator(SHAPE, 4, 4), "made up", "", fingerprints(seen), 1))
        attack = GradientMatching(parametrization=GenerativePrior(path), steps=1)
        assert evaluate(attack, Client(model), others, labels[: len(others)], METRICS).record["n"] == len(others)
        if len(others) < len(images):
            with pytest.raises(ConfigError, match=r"trained on 1 of the 4 victims \(image 2 of those given is one\)"):
                evaluate(attack, Client(model), images, labels, METRICS)


def test_the_package_offers_its_public_names() -> None:
    assert lit_recon.evaluate is evaluate
    assert (lit_recon.Client, lit_recon.Knowledge, lit_recon.Attack) == (Client, Knowledge, Attack)
    assert issubclass(GaussianNoise, lit_recon.Defense)
    assert {"audit", "evaluate", "metrics"} <= set(dir(lit_recon))
    with pytest.raises(AttributeError, match="no attribute 'certify'"):
        _ = lit_recon.certify
