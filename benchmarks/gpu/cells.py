"""Attacks on real victims, cell by cell of a table of settings, as far as the time goes.

A cell is a run folder of its own, made by `attack.py run`: what was cut short goes on where it stopped when the
benchmark is called again with the same `--out`, and what is finished there is not run again. The cell that has been
without a figure for longest comes first: records in `benchmarks/results` say when each was last measured.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.plan import Plan
from benchmarks.record import RESULTS, ROOT, Row
from lit_recon.reporting.run_folder import RunFolder

#: Settings in order of importance; others under configs/attack follow by name.
FIRST = ("geiping2020", "liu2025", "yin2021")
CONFIGS = ROOT / "configs" / "attack"
#: What runs a cell.
PROGRAM = (sys.executable, "attack.py")

#: A cell is not begun with fewer seconds left: it takes some until its first iteration.
LEAST_SECONDS = 45
#: Kept back for a cell to save its state when its time is over.
STOP_SECONDS = 15
_FIGURES = (
    "rmse", "rmse_std", "psnr", "ssim", "label_accuracy", "baseline_mean_image_rmse", "baseline_nearest_public_rmse",
    "n", "n_batches", "seconds", "seconds_per_iteration", "execution", "backbone_epochs", "backbone_accuracy",
    "peak_gpu_memory_mib",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One setting of the attack on one kind of client.

    Attributes:
        settings: name of a file under configs/attack.
        batch_norm: of the clients.
        batch: images per client.
    """

    settings: str
    batch_norm: str
    batch: int

    @property
    def name(self) -> str:
        """Of its row and its folder."""
        return f"{self.settings}-{self.batch_norm}-batch{self.batch}"

    @property
    def n_victims(self) -> int:
        """Four clients with one image, or two with several."""
        return 4 if self.batch == 1 else 2 * self.batch


def cells(plan: Plan) -> Iterator[Row]:
    """Figures of every cell for which there is time."""
    if plan.images is None and not plan.quick:
        yield {"skipped": "needs real images: give --images FILE.npz"}
        return
    table = [Cell("demo_digits", "eval", 1)] if plan.quick else all_cells(CONFIGS)
    for cell in by_age(table, last_measured(RESULTS)):
        yield {"cell": cell.name, **run_cell(cell, plan)}


def all_cells(configs: Path) -> list[Cell]:
    """Every setting with both modes of BatchNorm, and batches of one and of four."""
    found = {path.stem for path in configs.glob("*.yaml") if not path.stem.startswith("demo")}
    names = [name for name in FIRST if name in found] + sorted(found - set(FIRST))
    kinds = [(mode, batch) for batch in (1, 4) for mode in ("eval", "train")]
    return [Cell(name, mode, batch) for name in names for mode, batch in kinds]


def last_measured(results: Path) -> dict[str, str]:
    """When each cell was last measured to its end, in ISO form, by name."""
    dates: dict[str, str] = {}
    for path in results.glob("*-gpu-*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        for row in record["rows"]:
            if row.get("status") == "complete" and "cell" in row:
                dates[row["cell"]] = max(dates.get(row["cell"], ""), record["created"])
    return dates


def by_age(table: Sequence[Cell], measured: Mapping[str, str]) -> list[Cell]:
    """Cells without a figure in the order of the table, then the others, oldest figure first."""
    return sorted(table, key=lambda cell: measured.get(cell.name, ""))


def arguments(cell: Cell, plan: Plan) -> list[str]:
    """The command line of `attack.py` for a cell."""
    given = {
        "config": CONFIGS / f"{cell.settings}.yaml",
        "out": plan.out / "cells" / cell.name,
        "client.batch_norm": cell.batch_norm,
        "victims.n": cell.n_victims,
        "victims.batch_size": cell.batch,
        "backbone.cache": plan.out / "backbones",
        "trainer.accelerator": "gpu" if plan.on_gpu else "cpu",
        "save_every_seconds": 20,
        "wandb.mode": "disabled",
        "lpips.network": "none",
    }
    if plan.images is not None:
        given |= {"data": "lit_recon.data.sources.Npz", "data.init_args.root": plan.images}
    if plan.backbone is not None:
        given["backbone.checkpoint"] = plan.backbone
    if plan.quick:
        given |= {"victims.n": 2, "attack.init_args.steps": 3, "backbone.n_train": 64}
    options = dict(option.split("=", 1) for option in plan.options)
    return ["run", *(f"--{key}={value}" for key, value in {**given, **options}.items())]


def run_cell(cell: Cell, plan: Plan, program: Sequence[str] = PROGRAM) -> Row:
    """Run a cell, or go on with it, until it is done or the time is over."""
    folder = RunFolder(plan.out / "cells" / cell.name)
    command = arguments(cell, plan)
    if folder.is_complete:
        return {"status": "complete", **_figures(folder), "command": _shown(command)}
    if plan.left() < LEAST_SECONDS:
        return {"status": "not begun", "skipped": "no time was left"}
    log = plan.out / "cells" / f"{cell.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log.open("a", encoding="utf-8") as output:
        process = subprocess.Popen([*program, *command], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(timeout=plan.left() - STOP_SECONDS)
        except subprocess.TimeoutExpired:
            in_time = False
        else:
            in_time = True
        finally:
            _stop(process)
    row: Row = {"process_seconds": round(time.monotonic() - started, 1), "command": _shown(command)}
    if process.returncode == 0:
        return {"status": "complete", **_figures(folder), **row}
    status: Row = {"status": "failed", "exit_code": process.returncode} if in_time else {"status": "cut short"}
    return {**status, "last_line": _last_line(log), **row}


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Let the attack save its state and end; kill it if it does not."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _figures(folder: RunFolder) -> Row:
    metrics = json.loads(folder.metrics.read_text(encoding="utf-8"))
    return {key: metrics[key] for key in _FIGURES if key in metrics}


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else ""


def _shown(command: Sequence[str]) -> str:
    return shlex.join(["python", "attack.py", *command])
