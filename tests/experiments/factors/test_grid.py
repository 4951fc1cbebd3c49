"""From the configuration of a study of factors to its cells, and which command a configuration is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_recon.cli import reconn
from lit_recon.cli.entry import named_by_content
from lit_recon.data import ImageSet
from lit_recon.data.informed_splits import InformedSplit
from lit_recon.errors import ConfigError, LitReconError
from lit_recon.experiments.configuration import instantiated, resolved, settings_of
from lit_recon.experiments.factors import run as factors
from lit_recon.experiments.factors.measures import Transfer, files_of
from lit_recon.experiments.factors.run import FactorCellRun, Splits
from lit_recon.experiments.factors.settings import (
    Factor,
    FactorGrid,
    FactorSeries,
    FactorsSettings,
    TransferSettings,
    check_base,
)
from lit_recon.experiments.released_attack.settings import RECONN, ReconnSettings, ShadowSettings
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import write_metrics

CONFIGS = Path(__file__).parents[3] / "configs" / "reconn"
NETWORK = {"class_path": "ReleasedMLP", "init_args": {"hidden": [10], "activation": "elu"}}
WIDE = {"class_path": "ReleasedMLP", "init_args": {"hidden": [50], "activation": "elu"}}


def grid_of(path: Path, *arguments: str) -> tuple[FactorGrid, FactorsSettings]:
    """The cells of a configuration file."""
    parser = factors.parser("reconn.py factors")
    complete, config = resolved(parser, parser.parse_args(["--config", str(path), *arguments]), "nameless")
    study = settings_of(FactorsSettings, instantiated(parser, complete))
    return FactorGrid(study, yaml.safe_load(config)), study


def check(study: FactorsSettings, grid: FactorGrid) -> None:
    splits: Splits = {}
    for cell in grid.cells:
        FactorCellRun(study, cell).check(splits)


def small(path: Path, **changes: Any) -> Path:
    content = {
        "network": NETWORK,
        "factors": {
            "width": {"setting": "network.init_args.hidden", "values": [[5], [10]], "paper": [0.5, 0.6]},
            "rate": {
                "setting": "descent.lr",
                "values": [0.1, 0.2],
                "series": {"plain": {"settings": {"descent.momentum": 0.0}}, "heavy": {}},
            },
        },
        "paper": {"citation": "Somebody", "values": {"mse": 0.1}},
        **changes,
    }
    file = path / "small.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def test_values_that_are_the_base_s_share_its_cell(tmp_path: Path) -> None:
    grid, _ = grid_of(small(tmp_path))
    # The base, one width, one rate, and two rates without momentum.
    assert len(grid.cells) == 5
    (base,) = grid.description["base"]
    width, rate = grid.description["factors"]["width"], grid.description["factors"]["rate"]
    points = width["lines"][0]["points"]
    assert [point["cells"] == [base] for point in points] == [False, True]
    assert [(point["label"], point["place"], point["paper"]) for point in points] == [
        ("5", 5.0, 0.5),
        ("10", 10.0, 0.6),
    ]
    assert [[point["cells"] == [base] for point in line["points"]] for line in rate["lines"]] == [
        [False, False],
        [False, True],
    ]
    settings = {cell.folder: cell.settings for cell in grid.cells}
    narrow = settings[points[0]["cells"][0]]
    assert narrow["network"]["init_args"] == {"hidden": [5], "activation": "elu"}
    assert narrow["paper"]["values"] == {"mse": 0.5}
    assert settings[base]["paper"]["values"] == {"mse": 0.1}
    assert base.startswith("cells/base-")
    assert points[0]["cells"][0].startswith("cells/hidden_5-")


def test_a_part_of_a_study_is_the_cells_of_the_base_and_of_the_factors_named(tmp_path: Path) -> None:
    grid, _ = grid_of(small(tmp_path))
    width, rate = (
        {folder for line in factor["lines"] for point in line["points"] for folder in point["cells"]}
        for factor in grid.description["factors"].values()
    )
    base = {*grid.description["base"]}
    assert {cell.folder for cell in grid.part(["width"])} == base | width
    assert {cell.folder for cell in grid.part(["rate"])} == base | rate
    assert [len(grid.part([name])) for name in ("width", "rate")] == [2, 4]
    assert grid.part([]) == grid.part(["rate", "width"]) == grid.cells
    # the hash of a cell, and with it its folder, does not depend on the part that is run
    whole, study = grid_of(small(tmp_path), "--only", "[rate]")
    assert study.only == ["rate"]
    assert [cell.folder for cell in whole.cells] == [cell.folder for cell in grid.cells]


def test_seeds_multiply_cells_but_for_factors_that_set_the_seed(tmp_path: Path) -> None:
    drawn = {"setting": "seed", "values": [0, 7]}
    once = {"setting": "descent.steps", "values": [5], "seeds": [3]}
    file = small(tmp_path, factors={"seed": drawn, "steps": once}, seeds=[0, 1], seeded=["seed", "split.seed"])
    grid, _ = grid_of(file)
    seeds = [
        (cell.settings["seed"], cell.settings["split"]["seed"], cell.settings["descent"]["steps"])
        for cell in grid.cells
    ]
    # Twice the base; each value of `seed` on both splits, one of which is the base; once the other.
    assert seeds == [(0, 0, 100), (1, 1, 100), (0, 1, 100), (7, 0, 100), (7, 1, 100), (3, 3, 5)]
    assert len(grid.description["base"]) == 2


def test_a_cell_is_named_by_its_settings_whatever_else_is_studied(tmp_path: Path) -> None:
    first, _ = grid_of(small(tmp_path))
    more = {"other": {"cases": {"narrow and slow": {"network.init_args.hidden": [5]}, "as it is": {}}}}
    second, _ = grid_of(small(tmp_path, factors=more), "--trainer.threads", "2", "--cache", "elsewhere")
    assert {cell.folder for cell in second.cells} < {cell.folder for cell in first.cells}


def test_transfer_is_completed(tmp_path: Path) -> None:
    file = small(tmp_path, factors={"other": {"setting": "transfer.shadows", "values": [0, 9]}})
    grid, _ = grid_of(file)
    assert [cell.transfer for cell in grid.cells] == [
        None,
        {"shadows": 0, "way": "adapted"},
        {"shadows": 9, "way": "adapted"},
    ]


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        ({"setting": "descent.seps", "values": [1]}, "broken: 1: .*seps"),
        ({"setting": "descent.lr", "values": ["fast"]}, "expected float"),
        ({"setting": "out", "values": ["here"]}, "'out' is no setting that a factor may vary"),
        ({"setting": "transfer.models", "values": [1]}, "transfer has no setting models"),
        ({"setting": "transfer.shadows", "values": [1]}, "transfer.shadows must be at least 2"),
    ],
)
def test_a_factor_that_names_no_setting_is_refused(tmp_path: Path, factor: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        grid_of(small(tmp_path, factors={"broken": factor}))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Factor(), "either a setting with its values, or cases"),
        (lambda: Factor(setting="seed"), "either a setting with its values, or cases"),
        (lambda: Factor(setting="seed", values=[1], cases={"a": {}}), "either a setting with its values, or cases"),
        (lambda: Factor(setting="seed", series={"a": FactorSeries()}), "either a setting with its values, or cases"),
        (lambda: Factor(setting="seed", values=[1], labels=["a", "b"]), "got 2 for 1 values"),
        (lambda: Factor(setting="network", values=[NETWORK, WIDE]), "got ReleasedMLP more than once: name them"),
        (lambda: Factor(setting="seed", values=[1, 2], labels=["a", "a"]), "got a more than once"),
        (lambda: Factor(setting="seed", values=[1], series={"a": FactorSeries(values=[3, 3])}), "got 3 more than once"),
        (lambda: Factor(setting="seed", values=[1], paper=[0.1, 0.2]), "one entry per value or case, 1 of them; got 2"),
        (lambda: Factor(setting="seed", values=[1], seeds=[]), "one or more numbers"),
        (lambda: TransferSettings(way="scratch"), "the way `adapted` alone can"),
        (lambda: FactorsSettings(factors={}), "needs at least one factor"),
        (lambda: FactorsSettings(factors={"base": Factor("seed", [1])}), "got 'base': name it by its `title`"),
        (lambda: FactorsSettings(factors={"a/b": Factor("seed", [1])}), "got 'a/b': name it by its `title`"),
        (lambda: study(only=["rate", "seed"]), "only must name some of seed; got rate"),
        (lambda: study(seeds=[1, 1]), "seeds must differ"),
        (lambda: study(tried=0), "must be at least 1"),
        (lambda: study(gradient_steps=1), "gradient_steps must be at least 2; got 1"),
        (lambda: study(kappas=[0.0]), "strictly between 0 and 1"),
        (lambda: check_base(ReconnSettings(released=Path("x")), ShadowSettings()), "released is not set"),
        (lambda: check_base(ReconnSettings(curve=[3]), ShadowSettings()), "make split.shadow a factor"),
        (lambda: check_base(ReconnSettings(), ShadowSettings(store=Path("x"))), "store is not set"),
    ],
)
def test_settings_are_checked(build: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build()


def test_networks_of_one_class_are_told_apart_by_labels(tmp_path: Path) -> None:
    factor = {"setting": "network", "values": [NETWORK, WIDE], "labels": ["narrow", "wide"]}
    grid, _ = grid_of(small(tmp_path, factors={"network": factor}))
    points = grid.description["factors"]["network"]["lines"][0]["points"]
    assert [point["label"] for point in points] == ["narrow", "wide"]
    assert len(grid.cells) == 2


def study(**changes: Any) -> FactorsSettings:
    return FactorsSettings(factors={"seed": Factor("seed", [1])}, **changes)


def images(n: int, seed: int) -> ImageSet:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (n, 1, 28, 28), generator=generator).to(torch.uint8)
    return ImageSet(pixels, torch.arange(n) % 10, [str(label) for label in range(10)], f"images {seed}")


@pytest.fixture(scope="module")
def split() -> InformedSplit:
    """Images of MNIST's shape, as many as the studies need."""
    return InformedSplit(images(600, 0), images(3000, 1), images(8, 2), images(700, 3), images(20, 4))


def extremes(path: Path, to: Path) -> Path:
    """A study with the last value of every line and all cases: a line's other values are of the same kind."""
    content = yaml.safe_load(path.read_text())
    for factor in content["factors"].values():
        for own in (factor, *(factor.get("series") or {}).values()):
            own |= {key: own[key][-1:] for key in ("values", "labels") if key in own}
            if "paper" in own and "cases" not in factor:
                own["paper"] = own["paper"][-1:]
    to.write_text(yaml.safe_dump(content, sort_keys=False))
    return to


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*factors_*.yaml")), ids=lambda path: path.stem)
def test_the_cells_of_a_shipped_study_can_work(
    path: Path, split: InformedSplit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShadowSettings, "drawn", lambda own: split)
    grid, study = grid_of(extremes(path, tmp_path / path.name))
    assert len(grid.cells) > len(yaml.safe_load(path.read_text())["factors"])
    check(study, grid)
    assert path.read_text().startswith("# ")


def test_a_cell_that_cannot_work_is_named(
    split: InformedSplit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShadowSettings, "drawn", lambda own: replace(split, rest=None))
    grid, study = grid_of(small(tmp_path, factors={"other": {"setting": "transfer.shadows", "values": [2]}}))
    with pytest.raises(ConfigError, match="other: 2: another fixed set needs 600 images .* got 0"):
        check(study, grid)
    measured = {"width": {"setting": "seed", "values": [1], "measures": ["embedding"]}}
    grid, study = grid_of(small(tmp_path, factors=measured))
    few = replace(split, targets=split.targets.subset(torch.arange(5)))
    monkeypatch.setattr(ShadowSettings, "drawn", lambda own: few)
    with pytest.raises(ConfigError, match="split.targets of at least 6; got 5"):
        check(study, grid)


def test_a_study_keeps_the_network_of_lpips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def finish(run: FactorCellRun, splits: Splits) -> None:
        done = RunFolder.open(tmp_path / "study" / run.cell.folder, yaml.safe_dump(run.cell.settings))
        write_metrics(done, {"mse": 0.1, "lpips": 0.1})
        raise ConfigError("killed after its first cell")

    monkeypatch.setattr(FactorCellRun, "check", finish)
    command = ["factors", "--config", str(small(tmp_path)), "--out", str(tmp_path / "study")]
    for network, words in (
        ("alex", "killed after its first cell"),
        ("vgg", "holds cells with another LPIPS (lpips.network: 'alex' there, 'vgg' now)"),
    ):
        assert reconn([*command, "--lpips.network", network]) == 2
        assert words in capsys.readouterr().err


def test_a_study_does_not_go_on_with_other_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Finished cells state what they were made on; of the cells here, all but one are left."""
    monkeypatch.setattr(FactorCellRun, "check", lambda *_: (_ for _ in ()).throw(ConfigError("they are checked")))
    grid, _ = grid_of(config := small(tmp_path, split={"fixed": 50, "shadow": 20, "targets": 10}))
    done = RunFolder.open(tmp_path / "study" / grid.cells[0].folder, yaml.safe_dump(grid.cells[0].settings))
    for name in files_of(grid.cells[0].measures):
        (done.path / name).write_text("{}")
    write_metrics(done, {"mse": 0.1, "split_hash": "former"})
    assert reconn(["factors", "--config", str(config), "--out", str(tmp_path / "study")]) == 2
    assert "holds cells on other images (hash former, here " in capsys.readouterr().err


def test_another_fixed_set_shares_no_image_with_the_old_one(split: InformedSplit) -> None:
    new = Transfer(TransferSettings(50), ReconnSettings(), ShadowSettings(), split).split
    assert [len(part) for part in (new.fixed, new.shadow, new.targets)] == [600, 50, 8]
    assert new.rest is not None
    old = {image.numpy().tobytes() for image in split.fixed.images}
    assert not old & {image.numpy().tobytes() for image in new.fixed.images}
    assert torch.equal(new.targets.images, split.targets.images)
    # Whatever the oracle may choose from stays the same.
    everything = [
        sorted(i.numpy().tobytes() for p in (s.fixed, s.shadow, s.rest) for i in p.images) for s in (new, split)
    ]  # type: ignore[union-attr]
    assert everything[0] == everything[1]
    with pytest.raises(ConfigError, match="at most split.shadow=3000; got 3001"):
        _ = Transfer(TransferSettings(3001), ReconnSettings(), ShadowSettings(), split).split


def test_a_reconstructor_that_cannot_work_is_refused_before_training(
    split: InformedSplit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShadowSettings, "drawn", lambda own: split)
    logits = {"access": {"class_path": "BlackBox", "init_args": {"images": 9}}}
    factors = {"access": {"cases": {"weights": {}, "logits": logits}}}
    grid, study = grid_of(small(tmp_path, factors=factors, reconstructor={"class_path": "FirstLayerRidge"}))
    with pytest.raises(ConfigError, match="logits: FirstLayerRidge needs an adversary who sees the whole model"):
        check(study, grid)


def test_a_file_says_which_command_it_is_for(tmp_path: Path) -> None:
    file, other, broken = (tmp_path / name for name in ("factors.yaml", "run.yaml", "broken.yaml"))
    file.write_text("factors:\n  seed: {setting: seed, values: [1]}\n")
    other.write_text("seed: 1\n")
    broken.write_text("a: [\n")
    assert named_by_content(["run", "--config", str(file), "--seed", "1"])[0] == "factors"
    assert named_by_content(["run", f"--config={file}"])[0] == "factors"
    assert named_by_content(["run", "--config", str(other), "--config", str(file)])[0] == "factors"
    for arguments in (
        ["run", "--config", str(other)],
        ["run", "--config", str(broken)],
        ["run", "--config", str(tmp_path / "none.yaml")],
        ["run", "--config"],
        ["glm", "--config", str(file)],
        [],
    ):
        assert named_by_content(arguments) == arguments


def test_cells_that_train_the_same_models_do_not_start_at_the_same_time(tmp_path: Path) -> None:
    more = {
        "shadows": {"setting": "split.shadow", "values": [30, 60]},
        "ridge": {"setting": "reconstructor.init_args.ridges", "values": [[1.0]]},
        "rate": {"setting": "descent.lr", "values": [0.1]},
        "old": {"setting": "transfer.shadows", "values": [0, 9]},
        "new": {"setting": "transfer.shadows", "values": [9], "settings": {"transfer.way": "scratch"}},
    }
    grid, study = grid_of(small(tmp_path, factors=more), "--split.shadow", "80")
    base, thirty, sixty, ridge, rate, *moved = (FactorCellRun(study, cell).piece.shares for cell in grid.cells)
    ((store, _),) = base.items()
    assert (base, thirty, sixty, ridge) == ({store: 80}, {store: 30}, {store: 60}, {store: 80})
    assert list(rate.values()) == [80]
    assert store not in rate
    # Models of another fixed set have a store of their own; who adapts a reconstructor needs those of the old one, too.
    used, adapted, scratch = moved
    ((another, _),) = scratch.items()
    assert scratch == {another: 9}
    assert adapted == {store: 80, another: 9}
    assert used == {store: 80, another: 0}


def test_the_parser_of_a_cell_speaks_plainly() -> None:
    complete = RECONN.canonical({"seed": 3})
    assert complete["descent"]["lr"] == 0.2
    assert RECONN.canonical(complete) == complete
    with pytest.raises(LitReconError, match="descent.lr above 0"):
        RECONN.built({"descent": {"lr": -1.0}})
