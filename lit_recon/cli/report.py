"""`attack.py report`: the page of a finished run or study again, or one page that compares several runs."""

from __future__ import annotations

import pkgutil
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lit_recon.errors import ConfigError
from lit_recon.reporting.pages import compare_report, write_pdf
from lit_recon.reporting.provenance import parse_settings
from lit_recon.reporting.run_folder import RunFolder

#: Where the comparison of several runs goes unless told otherwise.
COMPARISON = Path("comparison.html")

_EXPERIMENTS = "lit_recon.experiments"
#: The function that writes the page of a command's runs; commands whose runs have no page have none.
_PAGES = {
    "attack run": "lit_recon.reporting.pages:build_report",
    "attack evaluate": f"{_EXPERIMENTS}.evaluate.page:build_evaluation",
    "attack audit": f"{_EXPERIMENTS}.audit.page:write_page",
    "attack bounds": f"{_EXPERIMENTS}.two_layer.page:write_page",
    "attack trainset": f"{_EXPERIMENTS}.trainset.page:write_page",
    "reconn run": f"{_EXPERIMENTS}.released_attack.page:write_page",
    "reconn factors": f"{_EXPERIMENTS}.factors.page:write_page",
    "reconn glm": f"{_EXPERIMENTS}.glm.page:write_page",
    "reconn membership": f"{_EXPERIMENTS}.membership.page:write_page",
    "reconn rero": f"{_EXPERIMENTS}.rero.page:write_page",
    "train backbone": "",
    "train generator": f"{_EXPERIMENTS}.train.generator:write_page",
}
#: Runs from before the release 0.1.0 do not record their command: commands by a setting, of which the first that a run
#: has decides.
_BY_SETTING = {
    "max_accuracy_drops": "attack evaluate",
    "regression": "reconn glm",
    "sweeps": "attack bounds",
    "histogram": "reconn membership",
    "budget": "reconn rero",
    "factors": "reconn factors",
    "reconstructor": "reconn run",
    "recipe": "train generator",
    "attack": "attack run",
    "trunk": "train backbone",
}


def parser(program: str) -> ArgumentParser:
    """The command's arguments."""
    arguments = ArgumentParser(prog=program, description=__doc__, exit_on_error=False)
    arguments.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    arguments.add_argument("--pdf", action="store_true", help="write every page as a PDF, too")
    arguments.add_argument(
        "--out", type=Path | None, default=None, help=f"page that compares several runs (default: {COMPARISON})"
    )
    return arguments


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Rebuild the page of one run, or of every run and their comparison."""
    runs: list[Path] = values.runs
    if len(runs) == 1 and values.out is not None:
        raise ConfigError("--out names the page that compares several runs, but one run is given: name another run")
    pages = [("report", _rebuilt(run)) for run in runs]
    if len(runs) > 1:
        pages.append(("comparison", compare_report(runs, values.out or COMPARISON)))
    for kind, page in pages:
        print(f"{kind:<11} {page}")
        if values.pdf:
            print(f"PDF         {write_pdf(page)}")


def _rebuilt(run: Path) -> Path:
    command = _command_of(RunFolder(run))
    page = _PAGES.get(command, _PAGES["attack run"])
    if not page:
        raise ConfigError(
            f"{run} holds a run of {command}, which has no page: see {RunFolder(run).metrics}, or give the folder of "
            "an attack"
        )
    written: Path = pkgutil.resolve_name(page)(run)
    return written


def _command_of(folder: RunFolder) -> str:
    """Script and command that made a run, such as `attack run`; empty where the folder holds no run."""
    if folder.command:
        return " ".join(folder.command.replace(".py", "").split()[-2:])
    settings = parse_settings(folder.config.read_text(encoding="utf-8"), folder.config) if folder.is_run else {}
    return next((command for setting, command in _BY_SETTING.items() if setting in settings), "")
