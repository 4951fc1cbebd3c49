from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lit_recon.errors import ShapeError
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import LossCurve, VictimRow, write_losses, write_metrics, write_tensors, write_victims


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.open(tmp_path, "a: 1\n")


def victim(identity: int, **scores: float | None) -> VictimRow:
    return VictimRow(batch=0, id=identity, label=1, recovered_label=2, loss=0.5, scores=scores)


def test_metrics_are_plain_json_and_mark_the_run_as_complete(folder: RunFolder) -> None:
    assert not folder.is_complete
    metrics = {"rmse": 0.1, "n": 3, "lpips": None, "lpips_reason": "größe", "notes": ["a", "b"]}
    write_metrics(folder, metrics)
    assert json.loads(folder.metrics.read_text(encoding="utf-8")) == metrics
    assert folder.is_complete


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_figures_that_json_cannot_hold_become_null_with_a_reason(folder: RunFolder, value: float) -> None:
    write_metrics(folder, {"psnr": value})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(folder.metrics.read_text(), parse_constant=refuse)
    assert found == {"psnr": None, "psnr_reason": f"not a finite number: {value}"}


def test_victims_have_the_columns_of_the_design(folder: RunFolder) -> None:
    write_victims(folder, [victim(7, mse=0.01, rmse=0.1, lpips=None), victim(8, mse=0.04, rmse=0.2, lpips=0.3)])
    with folder.victims.open(newline="") as file:
        table = list(csv.reader(file))
    assert table == [
        ["batch", "id", "label", "recovered_label", "certified", "mse", "rmse", "lpips", "loss"],
        ["0", "7", "1", "2", "", "0.01", "0.1", "", "0.5"],
        ["0", "8", "1", "2", "", "0.04", "0.2", "0.3", "0.5"],
    ]


def test_victims_with_different_scores_are_refused(folder: RunFolder) -> None:
    with pytest.raises(ShapeError, match=r"image 8 has \['mse'\]"):
        write_victims(folder, [victim(7, rmse=0.1), victim(8, mse=0.1)])
    assert not folder.victims.exists()


def test_losses_of_curves_with_different_terms_share_one_table(folder: RunFolder) -> None:
    write_losses(
        folder,
        [
            LossCurve(0, 0, {"loss": [2.0, 1.0], "step": [0, 5]}),
            LossCurve(0, 1, {"step": [0], "loss": [3.0], "total_variation": [0.25]}),
        ],
    )
    assert folder.losses.read_text().splitlines() == [
        "batch,restart,step,loss,total_variation",
        "0,0,0,2.0,",
        "0,0,5,1.0,",
        "0,1,0,3.0,0.25",
    ]


def test_no_losses_are_a_table_without_rows(folder: RunFolder) -> None:
    write_losses(folder, [])
    assert folder.losses.read_text() == "batch,restart,step,loss\n"


def test_tensors_come_back_bit_by_bit(folder: RunFolder) -> None:
    images = torch.rand(3, 2, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    strided = images[0].permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2).requires_grad_()
    labels = torch.tensor([1, 0])
    write_tensors(
        folder,
        reconstructions=strided,
        targets=images[1],
        nearest_public=images[2],
        labels=labels,
        recovered_labels=1 - labels,
        class_names=["a", "b"],
    )
    found = load_file(folder.reconstructions)
    assert torch.equal(found["reconstructions"], images[0])
    assert torch.equal(found["targets"], images[1])
    assert torch.equal(found["nearest_public"], images[2])
    assert torch.equal(found["labels"], labels)
    assert torch.equal(found["recovered_labels"], 1 - labels)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("reconstructions", torch.zeros(2, 1, 4, 5), r"reconstructions must be .* like the targets \(2, 1, 4, 4\)"),
        ("targets", torch.zeros(4, 4), r"must be \(n, c, h, w\)"),
        ("nearest_public", torch.full((2, 1, 4, 4), 1.5), r"nearest_public must hold pixels in \[0, 1\]; got 1.5 to"),
        ("reconstructions", torch.full((2, 1, 4, 4), np.nan), r"reconstructions must hold pixels in \[0, 1\]; got nan"),
        ("labels", torch.zeros(3), r"labels must be \(n,\) with n=2; got \(3,\)"),
        ("recovered_labels", torch.zeros(2, 1), r"recovered_labels must be \(n,\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(folder: RunFolder, name: str, value: torch.Tensor, message: str) -> None:
    tensors = {key: torch.zeros(2, 1, 4, 4) for key in ("reconstructions", "targets", "nearest_public")}
    tensors |= {key: torch.zeros(2, dtype=torch.int64) for key in ("labels", "recovered_labels")}
    with pytest.raises(ShapeError, match=message):
        write_tensors(folder, **(tensors | {name: value}))
    assert not folder.reconstructions.exists()
