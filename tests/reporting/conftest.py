"""Finished runs with known content, written through the public writers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_recon.reporting.run_folder import RunFolder, marked
from lit_recon.reporting.writing import LossCurve, VictimRow, write_losses, write_metrics, write_tensors, write_victims

MakeRun = Callable[..., RunFolder]

SETTINGS: dict[str, Any] = {
    "attack": {
        "class_path": "lit_recon.attacks.updates.GradientMatching",
        "init_args": {"steps": 30, "priors": [{"class_path": "TotalVariation", "init_args": {"weight": 0.1}}]},
    },
    "client": {"batch_norm": "eval"},
    "knowledge": {"labels": False, "batch_norm": "running"},
    "paper": {
        "citation": "Geiping et al., NeurIPS 2020",
        "values": {"rmse": 0.16, "feature_error": 0.171},
        "note": "Batches of 16.",
    },
}


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a finished run: `n` images in batches of `batch_size`, the first `won` of them nearer than public ones."""

    def make(
        name: str = "run",
        n: int = 4,
        batch_size: int = 2,
        won: int = 3,
        shape: tuple[int, int, int] = (3, 8, 8),
        settings: dict[str, Any] | None = None,
        metrics: dict[str, Any] | None = None,
        class_names: tuple[str, ...] = ("cat", "dog"),
        seed: int = 0,
        first_id: int = 100,
        finished: bool = True,
        certified: tuple[bool | None, ...] = (),
        command: str = "attack.py run",
    ) -> RunFolder:
        config = marked(yaml.safe_dump(SETTINGS if settings is None else settings), command)
        folder = RunFolder.open(tmp_path / name, config)
        generator = torch.Generator().manual_seed(seed)
        targets, found, public = torch.rand(3, n, *shape, generator=generator)
        labels = torch.arange(n) % 2
        recovered = labels.clone()
        recovered[-1] = 1 - labels[-1]
        write_tensors(
            folder,
            reconstructions=found,
            targets=targets,
            nearest_public=public,
            labels=labels,
            recovered_labels=recovered,
            class_names=class_names,
        )
        rmse = [0.01 * (i + 1) if i < won else 0.302 + 0.01 * i for i in range(n)]
        rows = [
            VictimRow(
                batch=i // batch_size,
                id=first_id + i,
                label=int(labels[i]),
                recovered_label=int(recovered[i]),
                loss=0.001 * (i // batch_size + 1),
                scores={
                    "mse": rmse[i] ** 2,
                    "rmse": rmse[i],
                    "psnr": 20.0 + i,
                    "ssim": 0.9 - 0.01 * i,
                    "lpips": None,
                    "mean_image_rmse": 0.25,
                    "nearest_public_rmse": 0.2,
                },
                certified=certified[i] if certified else None,
            )
            for i in range(n)
        ]
        write_victims(folder, rows)
        n_batches = max(row.batch for row in rows) + 1
        steps = [0.0, 10.0, 20.0, 30.0]
        write_losses(
            folder,
            [LossCurve(b, 0, {"step": steps, "loss": [1.0 / 10**k for k in range(4)]}) for b in range(n_batches)],
        )
        if finished:
            write_metrics(folder, {**_figures(rmse, n_batches), **(metrics or {})})
        return folder

    return make


def _figures(rmse: list[float], n_batches: int) -> dict[str, Any]:
    values = torch.tensor(rmse, dtype=torch.float64)
    return {
        "rmse": float(values.mean()),
        "rmse_std": float(values.std(correction=0)),
        "psnr": 21.46,
        "psnr_std": 1.118,
        "ssim": 0.8851,
        "ssim_std": 0.0111,
        "lpips": None,
        "lpips_reason": "its weights are not on this machine",
        "label_accuracy": 0.75,
        "baseline_mean_image_rmse": 0.2512,
        "baseline_nearest_public_rmse": 0.1987,
        "n": len(rmse),
        "n_batches": n_batches,
        "seconds": 125.0,
        "seconds_per_iteration": 0.0123,
        "seed": 7,
        "version_lit_recon": "0.1.0",
        "version_torch": "2.13.0",
        "device": "a processor",
        "command": "python attack.py run --config configs/attack/geiping2020.yaml",
        "created": "2026-03-01T12:30:00+00:00",
        "notes": ["The labels were counted.", "The labels were counted."],
    }
