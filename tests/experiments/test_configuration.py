"""What a configuration comes to, and that its written form gives it again."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser, Namespace

from lit_recon.attacks.base import Attack
from lit_recon.attacks.trainset import MarginKKT
from lit_recon.attacks.updates import GlobalCosine, GradientMatching, TotalVariation
from lit_recon.data.sources import Digits, Npz
from lit_recon.errors import ConfigError, LitReconError
from lit_recon.experiments.configuration import find_configuration, instantiated, resolved, settings_of
from lit_recon.experiments.evaluate import run as evaluate
from lit_recon.experiments.evaluate.grid import build_cells
from lit_recon.experiments.evaluate.settings import EvaluateSettings
from lit_recon.experiments.settings import AttackSettings
from lit_recon.experiments.trainset import run as trainset
from lit_recon.experiments.trainset.settings import TrainsetSettings
from lit_recon.experiments.update_attack import run
from lit_recon.models import ConvNet
from lit_recon.models.generative.generator import ConvGenerator, GeneratorCheckpoint, save_generator

CONFIGS = Path(__file__).parents[2] / "configs"
DEMO = CONFIGS / "attack" / "demo_digits.yaml"


@pytest.fixture
def parser() -> ArgumentParser:
    return run.parser("attack.py run")


def settings(parser: ArgumentParser, *arguments: str) -> tuple[Namespace, dict[str, object], AttackSettings]:
    complete, text = resolved(parser, parser.parse_args(list(arguments)), "nameless")
    return complete, yaml.safe_load(text), AttackSettings(**instantiated(parser, complete))


def test_without_a_file_everything_has_a_default(parser: ArgumentParser) -> None:
    complete, written, built = settings(parser)
    assert complete.name == "nameless"
    assert Path(complete.out) == Path("runs/nameless")
    assert isinstance(built.attack, GradientMatching)
    assert isinstance(built.data, Digits)
    assert built.backbone.trunk is None
    victims = {"n": 50, "pool": "evaluation", "batch_size": 1, "distinct_labels": True, "seed": 0, "n_public": None}
    assert written["victims"] == victims


def test_a_file_names_the_run_and_options_override_it(parser: ArgumentParser, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(DEMO.read_text().replace("name: demo_digits\n", ""))
    complete, _, built = settings(
        parser, "--config", str(path), "--data", "Npz", "--data.root", "x.npz", "--attack.steps", "7", "--victims.n=3"
    )
    assert complete.name == "mine"
    assert isinstance(built.data, Npz)
    assert built.data.root == Path("x.npz")
    assert isinstance(built.attack, GradientMatching)
    assert built.attack.steps == 7
    assert isinstance(built.attack.objective, GlobalCosine)
    assert [type(prior) for prior in built.attack.image_priors] == [TotalVariation]
    assert built.backbone.trunk is not None
    trunk = built.backbone.trunk((1, 8, 8))
    assert isinstance(trunk, ConvNet)
    assert trunk.arguments["activation"] == "elu"


def test_a_path_may_begin_with_the_home_folder(
    parser: ArgumentParser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("{data: {class_path: Npz, init_args: {root: ~/x.npz}}, name: mine}")
    complete, written, built = settings(parser, "--config", str(find_configuration("~/mine.yaml")), "--out=~/run")
    assert written["out"] == str(complete.out) == str(tmp_path / "run")
    assert isinstance(built.data, Npz)
    assert built.data.root == tmp_path / "x.npz"


def test_the_written_configuration_gives_itself_again(parser: ArgumentParser, tmp_path: Path) -> None:
    complete, text = resolved(
        parser, parser.parse_args(["--config", str(DEMO), "--overwrite", "true", "--seed", "3"]), "x"
    )
    assert complete.overwrite
    path = tmp_path / "config.yaml"
    path.write_text(text)
    again, text_again = resolved(parser, parser.parse_args(["--config", str(path)]), "x")
    assert text_again == text
    assert not again.overwrite  # repeating a run must not destroy it
    assert (again.name, again.seed) == ("demo_digits", 3)


def test_what_a_nested_constructor_refuses_is_told_in_its_words(parser: ArgumentParser) -> None:
    values = parser.parse_args(["--attack.solver", "Adam", "--attack.solver.lr=-1"])
    with pytest.raises(ConfigError, match=r"^Adam needs a learning rate above 0; got -1$"):
        instantiated(parser, values)


@pytest.mark.parametrize(
    ("name", "value"), [("clients_per_batch", "0"), ("save_every_seconds", "0"), ("backbone.epochs", "-1")]
)
def test_values_out_of_range_are_refused(parser: ArgumentParser, name: str, value: str) -> None:
    with pytest.raises(ConfigError, match="must be"):
        settings(parser, f"--{name}={value}")


def data_root(path: Path) -> list[str]:
    """What a shipped file leaves to be said: where its images are, unless they come with the package."""
    source = yaml.safe_load(path.read_text()).get("data", {"class_path": "Digits"})["class_path"]
    return [] if source in ("Digits", "Photos") else ["--data.root", "data"]


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a generator, which some attacks cannot be built without."""
    path = tmp_path_factory.mktemp("generator") / "generator.safetensors"
    made = ConvGenerator((3, 32, 32), latent_size=2, width=1)
    save_generator(path, GeneratorCheckpoint(made, "cifar10", "0" * 16, torch.zeros(1, dtype=torch.int64), epoch=1))
    return path


@pytest.mark.parametrize("path", sorted((CONFIGS / "attack").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_attack_is_valid(path: Path, parser: ArgumentParser, generator: Path) -> None:
    needs_generator = "GenerativePrior" in path.read_text()
    key = "--attack.init_args.parametrization.init_args.checkpoint"
    complete, _, built = settings(
        parser, "--config", str(path), *data_root(path), *([key, str(generator)] if needs_generator else [])
    )
    assert complete.name == path.stem
    assert isinstance(built.attack, Attack)
    assert path.read_text().startswith("# ")


OTHER_COMMANDS = {
    "train/generator_*": "train.generator",
    "train/*": "train.backbone",
    "reconn/*factors_*": "factors.run",
    "reconn/glm_*": "glm.run",
    "reconn/membership_*": "membership.run",
    "reconn/rero_*": "rero.run",
    "reconn/*": "released_attack.run",
    "bounds/*": "two_layer.run",
}
OTHERS = {
    path: module for pattern, module in reversed(OTHER_COMMANDS.items()) for path in CONFIGS.glob(f"{pattern}.yaml")
}


@pytest.mark.parametrize("path", sorted(OTHERS), ids=lambda path: path.stem)
def test_every_other_shipped_file_is_valid(path: Path) -> None:
    other = importlib.import_module(f"lit_recon.experiments.{OTHERS[path]}").parser("command")
    complete, _ = resolved(other, other.parse_args(["--config", str(path), *data_root(path)]), "nameless")
    assert complete.name == path.stem
    instantiated(other, complete)
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("name", ["buzaglo2023", "haim2022_cifar10", "haim2022_mnist"])
def test_at_the_papers_size_training_sets_are_attacked_as_in_the_paper(name: str) -> None:
    path, arguments = CONFIGS / "trainset" / f"{name}.yaml", trainset.parser("attack.py trainset")
    header = [line.lstrip("# ") for line in path.read_text().splitlines() if re.match(r"# +--", line)]
    options = [*data_root(path), *shlex.split(" ".join(header))]
    complete, _ = resolved(arguments, arguments.parse_args(["--config", str(path), *options]), "nameless")
    attack = settings_of(TrainsetSettings, instantiated(arguments, complete)).attacks["kkt"]
    assert isinstance(attack, MarginKKT)
    assert (attack.subspace, attack.optimizer, attack.steps) == (False, "sgd", 50_000)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((CONFIGS / "evaluate").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_cell_of_a_shipped_grid_is_valid(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generator: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # a study finds the files it names in the package
    arguments = evaluate.parser("attack.py evaluate")
    source = yaml.safe_load(path.read_text())["data"]["class_path"]
    root = [] if source == "Digits" else ["--data.root", "data"]
    complete, config = resolved(arguments, arguments.parse_args(["--config", str(path), *root]), "evaluate")
    whole = settings_of(EvaluateSettings, instantiated(arguments, complete))
    cells = build_cells(whole, yaml.safe_load(config))
    assert len({cell.folder for cell in cells}) == len(cells)
    one_of_each = {(cell.kind, cell.defense, cell.attack): cell for cell in cells}
    for cell in one_of_each.values():
        built = cell.built(Path("nowhere"), generator)
        if cell.kind != "generator":
            assert (built["defense"] is None) == (cell.defense in ("none", "local_steps", "aggregation"))
    figures = {} if whole.paper is None else whole.paper.values
    printed = {(cell.attack, cell.defense) for cell in cells if cell.paper is not None and cell.kind == "attack"}
    assert printed == {(attack, defense) for attack, families in figures.items() for defense in families}
    losses = set() if whole.paper is None else set(whole.paper.losses)
    assert {cell.defense for cell in cells if cell.paper is not None and cell.kind == "utility"} == losses
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize(
    "given", ["geiping2020", "geiping2020.yaml", "attack/geiping2020", "configs/attack/geiping2020.yaml"]
)
def test_a_shipped_configuration_is_found_by_name(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_configuration(given).samefile(CONFIGS / "attack" / "geiping2020.yaml")
    (tmp_path / "geiping2020").mkdir()  # a run folder of that name is no configuration
    assert find_configuration(given).samefile(CONFIGS / "attack" / "geiping2020.yaml")


def test_a_file_that_exists_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("geiping2020").write_text("name: mine")
    assert find_configuration("geiping2020") == Path("geiping2020")


def test_a_folder_decides_between_two_of_a_name() -> None:
    assert find_configuration("dp_digits", "train").samefile(CONFIGS / "train" / "dp_digits.yaml")
    assert find_configuration("dp_digits", "reconn").samefile(CONFIGS / "reconn" / "dp_digits.yaml")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("dp_digits", "give one of reconn/dp_digits, train/dp_digits"),
        ("geiping2002", "such as attack/geiping2020"),
        ("reconn/geiping2020", "such as attack/geiping2020"),
        ("nothing_like_it", "such as attack/analytic, "),
    ],
)
def test_a_name_without_a_configuration_is_refused(given: str, expected: str) -> None:
    with pytest.raises(LitReconError, match=re.escape(expected)):
        find_configuration(given)
