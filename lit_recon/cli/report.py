"""`attack.py report`: the page of a finished run or of an evaluation again, or one page about several runs."""

from __future__ import annotations

import importlib
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lit_recon.errors import ConfigError
from lit_recon.experiments.evaluate.page import build_evaluation
from lit_recon.reporting.pages import build_report, compare_report
from lit_recon.reporting.run_folder import GridFolder, RunFolder
from lit_recon.reporting.settings import parse_settings

#: Where the comparison of several runs goes unless told otherwise.
COMPARISON = Path("comparison.html")

#: Whose pages have words of their own: modules by a setting, the first that a run has.
_PAGES = {
    "regression": "lit_recon.experiments.glm.page",
    "sweeps": "lit_recon.experiments.two_layer.page",
    "histogram": "lit_recon.experiments.membership.page",
    "budget": "lit_recon.experiments.rero.page",
    "factors": "lit_recon.experiments.factors.page",
    "reconstructor": "lit_recon.experiments.released_attack.page",
    "recipe": "lit_recon.experiments.train.generator",
}


def parser(program: str) -> ArgumentParser:
    """The command's arguments."""
    arguments = ArgumentParser(prog=program, description=__doc__, exit_on_error=False)
    arguments.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    arguments.add_argument(
        "--out", type=Path | None, default=None, help=f"page that compares several runs (default: {COMPARISON})"
    )
    return arguments


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Rebuild the page of one run, or of every run and their comparison."""
    runs: list[Path] = values.runs
    if len(runs) == 1 and values.out is not None:
        raise ConfigError("--out names the page that compares several runs, but one run is given: name another run")
    for run in runs:
        print(f"report      {_rebuilt(run)}")
    if len(runs) > 1:
        print(f"comparison  {compare_report(runs, values.out or COMPARISON)}")


def _rebuilt(run: Path) -> Path:
    """The page of whichever command the folder is from."""
    if GridFolder(run).grid.is_file():
        return build_evaluation(run)
    folder = RunFolder(run)
    settings = parse_settings(folder.config.read_text(encoding="utf-8"), folder.config) if folder.is_run else {}
    page = next((module for setting, module in _PAGES.items() if setting in settings), None)
    if page is None:
        return build_report(run)
    written: Path = importlib.import_module(page).write_page(run)
    return written
