"""From one command to a page of bounds on reconstruction and of attacks beside them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_recon import cli

ROOT = Path(__file__).parents[2]
CONFIG = ["rero", "--config", ROOT / "configs" / "reconn" / "rero_digits.yaml"]
SIZES = {
    "split.fixed": 60,
    "split.shadow": 90,
    "split.targets": 24,
    "descent.steps": 20,
    "execution": "batched_mlp",
    "budget.epsilons": "[10]",
    "prior.candidates": "[2,5]",
    "prior.samples": 200,
    "prior.thresholds": "[0.01]",
    "sampled": "null",
    "test_images": 300,
    "wandb.mode": "disabled",
}
SMALL = [*CONFIG, *(part for key, value in SIZES.items() for part in (f"--{key}", value))]
Run = Callable[..., tuple[int, str, str]]
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished study, and of its shadow models."""
    place = tmp_path_factory.mktemp("rero")
    arguments = [*SMALL, "--out", place / "run", "--cache", place / "cache"]
    assert cli.reconn(list(map(str, arguments))) == 0
    return place / "run"


@pytest.fixture
def rero(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command once more, with further arguments."""

    def run(*more: object) -> tuple[int, str, str]:
        arguments = [*SMALL, "--out", folder, "--cache", folder.parent / "cache", *more]
        code = cli.reconn(list(map(str, arguments)))
        return code, *capsys.readouterr()

    return run


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "rero.json").read_text())
    return found


def test_attacks_stay_below_their_bounds(folder: Path) -> None:
    metrics = json.loads((folder / "metrics.json").read_text())
    # Two finite priors, and one threshold at a certified kappa.
    assert metrics["comparisons"] == 3
    assert metrics["comparisons_below"] == 3
    assert metrics["formats"].keys() < metrics.keys()
    assert metrics["formats"]["epsilon_10.mse"]["name"] == "MSE, epsilon 10"
    assert metrics["formats"]["epsilon_10.success_rate_of_2"]["unit"] == "%"
    cells = {cell["name"]: cell for cell in record(folder)["cells"]}
    assert list(cells) == ["plain", "unknown_initialization", "clipped", "epsilon_10"]
    mean = cells["plain"]["baseline_mean_image_mse"]
    assert cells["plain"]["mse"] < 0.7 * mean
    assert cells["unknown_initialization"]["mse"] > 0.95 * mean
    assert cells["epsilon_10"]["mse"] > 0.95 * mean
    # Without noise the adversary's model of the true candidate is the released one.
    named = {row["prior"]: row["success_rate"] for row in cells["clipped"]["comparisons"] if row["candidates"]}
    assert named == {"one of 2 candidates": 1.0, "one of 5 candidates": 1.0}
    # Twenty steps: the closed form's noise for a hundred, 4.99889, over the root of five.
    assert cells["epsilon_10"]["noise_multiplier"] == pytest.approx(4.99889 / 5**0.5, rel=1e-5)


def test_rates_follow_from_the_cells(folder: Path) -> None:
    cells = record(folder)["cells"]
    with (folder / "rero.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(cell["comparisons"]) for cell in cells) == 4 * 7
    for cell in cells:
        with (folder / cell["folder"] / "victims.csv").open(newline="") as file:
            errors = [float(row["mse"]) for row in csv.DictReader(file)]
        expected = sum(error <= 0.01 for error in errors) / 24
        told = [row for row in rows if row["cell"] == cell["name"] and row["threshold"] and row["success_rate"]]
        # Against the Gaussian and the ball nothing is held: digits are not drawn from them.
        assert ["images" in row["prior"] for row in told] == [True, True]
        assert [float(row["success_rate"]) for row in told] == [pytest.approx(expected)] * 2


def test_the_page_says_what_was_found(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    for words in (
        "No attack succeeded more often than its bound allows, beyond chance, in 3 comparisons.",
        "estimates, not certificates",
        "initial weights unknown",
        "Clopper",
        "Cor. 4",
    ):
        assert words in page
    assert page.count('src="data:image/') == 5
    assert "http" not in page.replace("http://www.w3.org", "").split("<style>")[0]
    before = page
    (folder / "report.html").unlink()
    assert cli.attack(["report", str(folder)]) == 0
    assert (folder / "report.html").read_text(encoding="utf-8") == before


@pytest.mark.slow
def test_a_finished_study_is_kept_and_grows_by_budgets(rero: Run, folder: Path) -> None:
    code, _, err = rero()
    assert code == 2
    assert "holds a finished run" in err
    written = {path: path.stat().st_mtime_ns for path in folder.glob("cells/*/metrics.json")}
    code, out, _ = rero("--budget.epsilons", "[10,100000]")
    assert code == 0
    assert "study       5 runs, 4 of them done" in out
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert "epsilon 100,000: MSE" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget.epsilons", "[0]"], "budget.epsilons must be above 0 and finite; got 0"),
        (["--budget.delta", "1.5"], "budget.delta must be strictly between 0 and 1; got 1.5"),
        (["--prior.kappas", "[2]"], "prior.kappas must be probabilities above 0 and at most 1"),
        (["--prior.candidates", "[25]"], "at most split.targets=24; got [25]"),
        (["--prior.samples", "23"], "at least split.targets=24; got 23"),
        (["--test_images", "0"], "test_images must be at least 1"),
        (["--store", "somewhere"], "store is not set for this command"),
        (["--initialization", "fresh"], "initialization must be known"),
        (["--descent.dp.target_epsilon", "1"], "descent.dp is not set for this command"),
        (["--descent.optimizer", "lion"], "descent.optimizer"),
        (["--reconstructor", "FirstLayerRidge"], "initial weights unknown: FirstLayerRidge needs"),
        (["--descent.snapshots", "[5]"], "reconn.py rero looks at final models only; got [5]"),
        (["--sampled", '{"rate": 1e-8}'], "sampled, rate 1e-08, epsilon 1: a record is used with chance 2e-07"),
        (["--sampled", "{}", "--budget.delta", "1e-14"], "sampled, rate 0.1, epsilon 1: delta must be at least"),
        pytest.param(["--trainer.accelerator", "gpu"], "gpu backend", marks=WITHOUT_GPU),
    ],
)
def test_bad_input_is_refused_in_one_line(rero: Run, arguments: list[str], message: str) -> None:
    code, out, err = rero(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_study_does_not_go_on_with_other_images(rero: Run, folder: Path) -> None:
    cell = next(folder.glob("cells/plain_*/metrics.json"))
    before = cell.read_text()
    cell.write_text(json.dumps({**json.loads(before), "split_hash": "former"}))
    code, _, err = rero("--budget.epsilons", "[10,100]")
    cell.write_text(before)
    assert code == 2
    assert "holds cells on other images (hash former, here " in err
    assert (folder / "metrics.json").is_file()  # the finished study is left as it was


def test_several_processes_are_refused(rero: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = rero()
    assert code == 2
    assert "runs in one process" in err


def test_one_attack_on_private_models(tmp_path: Path) -> None:
    sizes = {"split.fixed": 20, "split.shadow": 12, "split.targets": 3, "descent.steps": 2, "execution": "batched_mlp"}
    arguments = [f"--{key}={value}" for key, value in sizes.items()]
    where = [f"--out={tmp_path / 'run'}", f"--cache={tmp_path / 'cache'}", "--wandb.mode=disabled"]
    config = str(ROOT / "configs" / "reconn" / "dp_digits.yaml")
    dp = ["--descent.dp.bound", "0.5", "--descent.dp.target_epsilon", "5"]
    assert cli.reconn(["run", "--config", config, *arguments, *where, *dp]) == 0
    (store,) = (tmp_path / "cache").glob("*/store.json")
    described = json.loads(store.read_text())["training"]
    assert (described["descent.dp.target_epsilon"], described["descent.dp.bound"]) == (5.0, 0.5)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["epsilon"] == pytest.approx(5.0)
    assert "noise of the released model" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
