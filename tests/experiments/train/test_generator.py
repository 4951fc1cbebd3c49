"""`train.py generator`: what it leaves behind, and attacks that take or refuse its generator."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lit_recon.attacks.updates import AnalyticInversion, GenerativePrior, GradientMatching
from lit_recon.cli import attack, train
from lit_recon.data.dataset import fingerprints
from lit_recon.data.sources import Digits
from lit_recon.errors import ConfigError
from lit_recon.experiments.update_attack.run import refuse_known_victims
from lit_recon.models.generative.generator import ConvGenerator, GeneratorCheckpoint, load_generator, save_generator
from lit_recon.modules.data import VictimDataModule

CONFIGS = Path(__file__).parents[3] / "configs"
SMALL = (
    *("--n_train", "64", "--epochs", "1", "--latent_size", "4", "--width", "4", "--critic_width", "4"),
    *("--n_shown", "3", "--search_steps", "2", "--wandb.mode", "disabled", "--trainer.accelerator", "cpu"),
)


def arguments(folder: Path, *more: str) -> Sequence[str]:
    config = str(CONFIGS / "train" / "generator_digits.yaml")
    return ["generator", "--config", config, *SMALL, "--out", str(folder), *more]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "generator"
    assert train(arguments(folder)) == 0
    return folder


def test_a_training_leaves_its_generator_and_record(made: Path) -> None:
    checkpoint = load_generator(made / "generator.safetensors")
    metrics = json.loads((made / "metrics.json").read_text())
    assert metrics["split_hash"] == checkpoint.split_hash
    assert (metrics["n_train"], metrics["epochs"]) == (64, 1)
    assert 0 < metrics["search_rmse"] < 1
    page = (made / "report.html").read_text()
    assert f"RMSE of {metrics['search_rmse']:.3f}" in page
    assert "in one search of 2 steps" in page
    assert page.count("data:image/png") == 2
    [log] = made.glob("logs/version_0/metrics.csv")
    assert (made / "config.yaml").is_file()
    assert log.is_file()


def test_its_page_can_be_built_again(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (made / "report.html").read_text()
    (made / "report.html").unlink()
    assert attack(["report", str(made)]) == 0
    assert (made / "report.html").read_text() == page
    assert str(made / "report.html") in capsys.readouterr().out


def test_a_finished_training_is_kept(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (made / "generator.safetensors").read_bytes()
    assert train(arguments(made)) == 2
    assert "finished run" in capsys.readouterr().err
    (made / "metrics.json").unlink()  # killed before its last file
    (made / "checkpoints" / "seconds").write_text("1000\n")
    assert train(arguments(made)) == 0
    assert (made / "generator.safetensors").read_bytes() == before
    assert json.loads((made / "metrics.json").read_text())["seconds"] > 1000  # with those of the killed process


def test_a_generator_is_not_measured_on_other_images(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process was killed after the training, and the images were replaced since."""
    shutil.copytree(made, tmp_path / "copy")
    checkpoint = load_generator(made / "generator.safetensors")
    save_generator(tmp_path / "copy" / "generator.safetensors", replace(checkpoint, split_hash="former"))
    (tmp_path / "copy" / "metrics.json").unlink()
    assert train(arguments(tmp_path / "copy")) == 2
    assert "was trained on other images (hash former, here " in capsys.readouterr().err
    assert not (tmp_path / "copy" / "metrics.json").exists()


def test_damaged_or_unfinished_pages_are_refused(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.yaml").write_text((made / "config.yaml").read_text())
    assert attack(["report", str(copy)]) == 2
    assert "no finished training" in capsys.readouterr().err
    (copy / "metrics.json").write_text((made / "metrics.json").read_text())
    assert attack(["report", str(copy)]) == 2
    assert "samples.safetensors is missing or damaged" in capsys.readouterr().err


def test_settings_without_sense_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, expected in (
        (("--n_shown", "1"), "n_shown must be at least 2"),
        (("--n_shown", "500"), "at most 359"),
        (("--trainer.devices", "2"), "one process"),
    ):
        assert train(arguments(tmp_path / "none", *wrong)) == 2
        assert expected in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_an_attack_takes_it(made: Path, tmp_path: Path) -> None:
    prior = "--attack.init_args.parametrization.init_args.checkpoint"
    config = str(CONFIGS / "attack" / "jeon2021_digits.yaml")
    small = ["--backbone.epochs", "0", "--backbone.cache", str(tmp_path / "cache"), "--victims.n", "4"]
    quick = ["--attack.init_args.steps", "4", "--attack.init_args.restarts", "2", "--wandb.mode", "disabled"]
    where = ["--trainer.accelerator", "cpu", "--out", str(tmp_path / "run")]
    assert attack(["run", "--config", config, prior, str(made / "generator.safetensors"), *small, *quick, *where]) == 0
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["n"] == 4


def test_a_generator_that_knows_the_victims_is_refused(tmp_path: Path) -> None:
    victims = VictimDataModule(Digits(), n_victims=4, batch_size=2)
    others = VictimDataModule(Digits(), n_victims=4, batch_size=2, seed=7)
    public, test = victims.splits
    [first, *_] = victims.batches[1].tolist()

    def attacker(seen: torch.Tensor) -> GradientMatching:
        path = tmp_path / "generator.safetensors"
        save_generator(path, GeneratorCheckpoint(ConvGenerator((1, 8, 8), 4, 4), "digits", "", seen, 1))
        return GradientMatching(parametrization=GenerativePrior(path))

    refuse_known_victims(attacker(fingerprints(public)), victims)
    knowing = attacker(fingerprints(test)[[first]])
    with pytest.raises(ConfigError, match=rf"1 of the 4 victims \(image {first} of digits test"):
        refuse_known_victims(knowing, victims)
    assert first not in torch.cat(others.batches)
    refuse_known_victims(knowing, others)
    refuse_known_victims(AnalyticInversion(), victims)
