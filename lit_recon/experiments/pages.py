"""The page of a finished run, whichever command made it."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from pathlib import Path

from lit_recon.errors import ConfigError, CorruptFileError
from lit_recon.reporting.run_folder import RunFolder

_EXPERIMENTS = "lit_recon.experiments"
#: The function that writes the page of a command's runs; commands whose runs have no page have none.
PAGES = {
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
#: Commands whose runs hold an image for every target image, so that one page compares several of them.
_COMPARABLE = ("attack run", "reconn run", "reconn glm", "reconn membership")


def build_page(run: Path) -> Path:
    """Write the page of a finished run again, by the function of its command; LitReconErrors are that function's."""
    command = RunFolder(run).kind
    page = PAGES.get(command, PAGES["attack run"])
    if not page:
        raise ConfigError(
            f"{run} holds a run of {command}, which has no page: see {RunFolder(run).metrics}, or give the folder of "
            "an attack"
        )
    try:
        written: Path = pkgutil.resolve_name(page)(run)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CorruptFileError(
            f"{run}: its page cannot be built from what its files hold ({type(error).__name__}: {error}); restore the "
            "files that were edited, or repeat the run"
        ) from error
    return written


def require_comparable(runs: Sequence[Path]) -> None:
    """A ConfigError for a run of a command whose runs are not compared on one page, such as an audit or a grid."""
    for run in runs:
        command = RunFolder(run).kind
        if command in PAGES and command not in _COMPARABLE:
            own = f"; `python attack.py report {run}` writes its own page" if PAGES[command] else ""
            raise ConfigError(
                f"several runs are compared by their reconstructions, of {', '.join(_COMPARABLE)}; {run} is of "
                f"{command}: leave it out{own}"
            )


def lacks_page(run: Path) -> bool:
    """Whether a process was killed between the last figures of a run and its page."""
    folder = RunFolder(run)
    return folder.is_complete and not folder.report.is_file() and bool(PAGES.get(folder.kind))
