"""The pictures of an evaluation: which images they show where, and what they say where there are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray
from safetensors.numpy import load_file

from lit_recon.experiments.evaluate import galleries
from lit_recon.experiments.evaluate.galleries import gallery_panels
from lit_recon.experiments.evaluate.page import build_evaluation
from lit_recon.experiments.evaluate.results import Evaluation
from lit_recon.reporting.record import read_victims
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import write_tensors, write_victims
from tests.experiments.evaluate.conftest import change, entry
from tests.reporting.pixels import Pixels, decoded, enlarged, in_box, place, places, written

Images = NDArray[np.float32]
STRENGTHS = {"prune": (None, 0.5, 0.99), "noise": (None, 0.1, 1.0)}
ROWS = {None: "no defense", 0.5: "pruning 0.5", 0.99: "pruning 0.99", 0.1: "noise 0.1", 1.0: "noise 1"}
FAILED = ("noise", 0.1, "far")


def run_of(folder: RunFolder, defense: str, strength: float | None, attack: str) -> RunFolder:
    place = f"{'none' if strength is None else defense}_{strength}-{attack}-b2-0123abcd"
    return RunFolder(folder.path / "cells" / place)


def keep(run: RunFolder, found: Images, targets: Images) -> None:
    """Images of other content in a run; its classes are 0 and 1 in turn."""
    labels = torch.arange(len(found)) % 2
    images = {"reconstructions": torch.from_numpy(found), "targets": torch.from_numpy(targets)}
    write_tensors(run, **images, nearest_public=None, labels=labels, recovered_labels=labels)


@pytest.fixture
def varied(evaluated: RunFolder) -> RunFolder:
    """The evaluation with reconstructions that differ from cell to cell."""
    for seed, run in enumerate(sorted((evaluated.path / "cells").iterdir())):
        targets = load_file(run / "reconstructions.safetensors")["targets"]
        keep(RunFolder(run), np.random.default_rng(seed).random(targets.shape, dtype=np.float32), targets)
    return evaluated


def picture(folder: RunFolder, name: str) -> Pixels:
    build_evaluation(folder.path)
    return decoded((folder.figures / f"gallery_{name}__batch_2.png").read_bytes())


def kept(run: RunFolder, name: str = "reconstructions") -> Images:
    images: Images = load_file(run.reconstructions)[name]
    return images


@pytest.mark.parametrize(("defense", "name"), [("prune", "pruning"), ("noise", "noise")])
def test_every_image_is_below_its_target_in_the_row_of_its_strength(varied: RunFolder, defense: str, name: str) -> None:
    shown = picture(varied, name)
    columns: dict[str, list[int]] = {"near": [], "far": []}
    tops = []
    for strength in STRENGTHS[defense]:
        for attack in columns:
            if (defense, strength, attack) == FAILED:
                continue
            found = [place(shown, enlarged(image, 8)) for image in kept(run_of(varied, defense, strength, attack))]
            assert len({top for top, _ in found}) == 1
            columns[attack] = columns[attack] or [left for _, left in found]
            assert [left for _, left in found] == columns[attack]
        tops.append(found[0][0])
        label_top, label_left = place(shown, written(ROWS[strength]))
        assert tops[-1] < label_top < tops[-1] + 64
        assert label_left + written(ROWS[strength]).shape[1] < columns["near"][0]
    assert all(below - above > 64 for above, below in pairwise(tops))
    assert all(right - left > 64 for left, right in pairwise([*columns["near"], *columns["far"]]))
    for number, image in enumerate(kept(run_of(varied, defense, None, "near"), "targets")):
        (top, near), (same, far) = places(shown, enlarged(image, 8))
        assert (near, far) == (columns["near"][number], columns["far"][number])
        assert top == same < tops[0] - 64
    for title, attack in (("Near", "near"), ("Far, malicious server", "far")):
        title_top, left = place(shown, written(title))
        assert left == pytest.approx(columns[attack][0], abs=2)
        assert title_top < top


def test_the_metric_of_each_cell_is_below_its_images(varied: RunFolder) -> None:
    shown = picture(varied, "pruning")
    texts = {(0.5, "near"): "RMSE 0.060, strongest", (0.5, "far"): "RMSE 0.090", (0.99, "far"): "RMSE 0.300"}
    for (strength, attack), words in texts.items():
        top, left = place(shown, enlarged(kept(run_of(varied, "prune", strength, attack))[0], 8))
        (at,) = [y for y, x in places(shown, written(words, 12)) if abs(x - left) <= 2]
        assert top + 64 < at < top + 80
    assert len(places(shown, written("strongest", 12))) == 3


def test_images_are_the_first_ones_by_position_in_the_first_cell(
    varied: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(galleries, "IMAGES", 2)
    run = run_of(varied, "prune", 0.5, "far")  # lists its victims in another order
    rows, found, targets = read_victims(run.victims), kept(run), kept(run, "targets")
    order = [2, 1, 0, 3]
    write_victims(run, [rows[number] for number in order])
    keep(run, found[order], targets[order])
    shown = picture(varied, "pruning")
    assert [len(places(shown, enlarged(image, 8))) for image in targets] == [2, 2, 0, 0]
    assert [len(places(shown, enlarged(image, 8))) for image in found] == [1, 1, 0, 0]
    assert place(shown, enlarged(found[0], 8))[1] < place(shown, enlarged(found[1], 8))[1]


def test_images_are_those_that_the_grid_s_own_network_was_attacked_on(
    varied: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(galleries, "IMAGES", 2)
    for run in map(RunFolder, (varied.path / "cells").glob("*-near-*")):
        keep(run, kept(run), 1 - kept(run, "targets"))  # listed first, and on other images
    change(varied, networks={"near": "its own MLP"})
    run, shown = run_of(varied, "prune", 0.5, "far"), picture(varied, "pruning")
    for images, n in (kept(run, "targets"), 2), (kept(run), 1):
        assert [len(places(shown, enlarged(image, 8))) for image in images] == [n, n, 0, 0]


def test_cells_without_images_are_named(varied: RunFolder) -> None:
    words = {("prune", 0.5, "near"): "not run yet", ("prune", 0.99, "near"): "no images kept"}
    words |= {("prune", 0.5, "far"): "not applicable", FAILED: "out of memory"}
    words |= {("noise", 1.0, "near"): "other target images"}
    run_of(varied, "prune", 0.5, "near").metrics.unlink()
    run_of(varied, "prune", 0.99, "near").reconstructions.unlink()
    picky = run_of(varied, "prune", 0.5, "far")
    picky.metrics.unlink()
    varied.failure(picky.path.name).write_text(json.dumps({"reason": "it needs a wide layer", "applicable": False}))
    other = run_of(varied, "noise", 1.0, "near")
    keep(other, kept(other), 1 - kept(other, "targets"))
    pictures = {"prune": picture(varied, "pruning"), "noise": picture(varied, "noise")}
    for (defense, strength, attack), said in words.items():
        shown = pictures[defense]
        _, left = place(shown, enlarged(kept(run_of(varied, defense, None, attack))[0], 8))
        row, _ = place(shown, written(ROWS[strength]))
        (found,) = [(y, x) for y, x in places(shown, in_box(said)) if abs(y - row) < 16]
        assert left < found[1] < left + 64
    assert sum(len(places(shown, in_box("not"))) for shown in pictures.values()) == 2


def test_equal_strengths_of_two_defenses_are_told_apart(varied: RunFolder) -> None:
    cells = json.loads(varied.grid.read_text())["cells"]
    change(varied, cells=[{**cell, "strength": 0.5} if cell["strength"] == 0.1 else cell for cell in cells])
    pruned, noisy = (kept(run_of(varied, *level, "near"))[0] for level in (("prune", 0.5), ("noise", 0.1)))
    for name, own, other in (("pruning", pruned, noisy), ("noise", noisy, pruned)):
        shown = picture(varied, name)
        assert (len(places(shown, enlarged(own, 8))), len(places(shown, enlarged(other, 8)))) == (1, 0)


def test_victims_of_another_run_are_named(varied: RunFolder) -> None:
    run = run_of(varied, "prune", 0.5, "near")
    write_victims(run, [replace(row, id=row.id + 1) for row in read_victims(run.victims)])
    assert len(places(picture(varied, "pruning"), in_box("other target images"))) == 1


def test_a_defense_without_any_images_is_told_in_words(varied: RunFolder) -> None:
    for strength in (0.1, 1.0):
        run_of(varied, "noise", strength, "near").metrics.unlink()
    run_of(varied, "noise", 1.0, "far").metrics.unlink()
    page = build_evaluation(varied.path).read_text()
    assert "No images: not run yet; out of memory." in page
    assert [path.name for path in varied.figures.glob("gallery*")] == ["gallery_pruning__batch_2.png"]
    for run in (varied.path / "cells").glob("*/metrics.json"):
        run.unlink()
    panels = gallery_panels(Evaluation.read(varied))
    assert [panel.lead for panel in panels] == ["No images: not run yet.", "No images: not run yet; out of memory."]


def test_attacks_without_a_defense_have_a_picture_where_the_grid_has_no_other(varied: RunFolder) -> None:
    content = json.loads(varied.grid.read_text())
    change(varied, cells=[cell for cell in content["cells"] if cell["strength"] is None], defenses={})
    shown = picture(varied, "no_defense")
    assert len(places(shown, enlarged(kept(run_of(varied, "prune", None, "far"))[0], 8))) == 1
    assert len(places(shown, written("no defense"))) == 1


def test_attackers_who_do_not_know_the_defense_have_a_column(varied: RunFolder) -> None:
    content = json.loads(varied.grid.read_text())
    unaware = [
        {**cell, "aware": False} for cell in content["cells"] if cell["attack"] == "far" and cell["defense"] == "prune"
    ]
    change(varied, cells=[*content["cells"], *unaware])
    shown = picture(varied, "pruning")
    (_, known), (_, unknown) = places(shown, enlarged(kept(run_of(varied, "prune", 0.5, "far"))[0], 8))
    assert place(shown, written("server, defense unknown"))[1] - unknown < 200
    top, left = place(shown, in_box("without a defense there is nothing to know"))
    assert known < unknown < left
    assert abs(top - place(shown, written("no defense"))[0]) < 16


def test_attackers_who_never_know_the_defense_have_one_column(varied: RunFolder) -> None:
    content = json.loads(varied.grid.read_text())
    cells = [{**cell, "aware": None if cell["strength"] is None else False} for cell in content["cells"]]
    change(varied, cells=cells)
    shown = picture(varied, "pruning")
    lefts = {place(shown, enlarged(kept(run_of(varied, "prune", s, "far"))[0], 8))[1] for s in STRENGTHS["prune"]}
    assert len(lefts) == 1
    assert len(places(shown, written("server, defense unknown"))) == 1
    assert not places(shown, in_box("without a defense there is nothing to know"))


def test_the_page_made_again_has_the_same_pictures(varied: RunFolder) -> None:
    page = build_evaluation(varied.path).read_text()
    before = {path.name: path.read_bytes() for path in varied.figures.glob("gallery*")}
    for path in varied.figures.iterdir():
        path.unlink()
    again = build_evaluation(varied.path).read_text()
    assert {path.name: path.read_bytes() for path in varied.figures.glob("gallery*")} == before
    for panel in gallery_panels(Evaluation.read(varied)):
        assert all(picture.address in page and picture.address in again for picture in panel.pictures)
    order = ["Cost and protection", "Other metrics", "Images", "<h3>pruning, batch 2", "<h3>noise, batch 2"]
    assert sorted(order, key=page.rindex) == order


@pytest.mark.slow
@pytest.mark.parametrize("side", [32, 128])
def test_a_page_of_27_strengths_and_6_attacks_stays_small(
    tmp_path: Path, make_run: Callable[..., RunFolder], side: int
) -> None:
    """Of noise, which no compression makes smaller: photographs and their reconstructions take less."""
    folder = RunFolder.open(tmp_path / "grid", yaml.safe_dump({"name": "large"}))
    for number in range(6):
        run = make_run(f"grid/cells/{number}-0123", shape=(3, side, side))
        targets = kept(run, "targets")
        keep(run, np.random.default_rng(number).random(targets.shape, dtype=np.float32), targets)
    levels: list[tuple[str, float | None]] = [("none", None)]
    levels += [(f"d{number % 8}", 0.1 * number) for number in range(27)]
    attacks = {f"a{number}": f"attack {number}" for number in range(6)}
    places = {attack: f"cells/{number}-0123" for number, attack in enumerate(attacks)}
    cells = [entry("attack", place, *level, attack, 2) for level in levels for attack, place in places.items()]
    titles = {f"d{number}": f"defense {number}" for number in range(8)}
    content = {"cells": cells, "attacks": attacks, "defenses": titles, "max_accuracy_drops": [], "malicious": []}
    folder.grid.write_text(json.dumps(content))
    page = build_evaluation(folder.path)
    assert len(list(folder.figures.glob("gallery*"))) == 8
    assert 2e6 < page.stat().st_size < 6e6
