"""`attack.py report`: the page of a finished run or study again, or one page that compares several runs."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lit_recon.errors import ConfigError
from lit_recon.experiments.pages import build_page, require_comparable
from lit_recon.reporting.pages import compare_report, write_pdf

#: Where the comparison of several runs goes unless told otherwise.
COMPARISON = Path("comparison.html")


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
    if len(runs) > 1:
        require_comparable(runs)
    pages = [("report", build_page(run)) for run in runs]
    if len(runs) > 1:
        pages.append(("comparison", compare_report(runs, values.out or COMPARISON)))
    for kind, page in pages:
        print(f"{kind:<11} {page}")
        if values.pdf:
            print(f"PDF         {write_pdf(page)}")
