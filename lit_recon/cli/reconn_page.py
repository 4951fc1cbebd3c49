"""The page of an attack on released models: the report of a run, in the words of this threat model."""

from __future__ import annotations

from pathlib import Path

from lit_recon.reporting.atomic import write_text
from lit_recon.reporting.cards import gallery
from lit_recon.reporting.curves import HEIGHT, WIDTH
from lit_recon.reporting.formats import MISSING
from lit_recon.reporting.html import render
from lit_recon.reporting.paper import paper_of
from lit_recon.reporting.record import RunRecord
from lit_recon.reporting.settings import find_setting, flatten
from lit_recon.reporting.tables import facts, rmse_bars, summary_table
from lit_recon.reporting.words import Grant, notes, verdict


def write_page(folder: Path) -> Path:
    """Write the page of a finished run of `reconn.py run` into its folder, from the files in it alone.

    Raises:
        MissingDataError: the folder holds no finished run.
        CorruptFileError: one of its files is malformed.
    """
    record = RunRecord.read(folder)
    page = render(
        "report.html.j2",
        name=str(record.settings.get("name") or record.folder.path.resolve().name),
        paper=paper_of(record.settings),
        origin="Left the one unknown training image, in the middle what the attack made of the released model",
        verdict=verdict(record),
        bars=rmse_bars(record),
        summary=summary_table(record),
        gallery=gallery(record),
        chart=None,
        chart_size=(WIDTH, HEIGHT),
        restarts=1,
        knowledge=grants(record),
        notes=notes(record),
        settings=flatten(record.settings),
        facts=facts(record),
        command=record.text("command"),
        created=record.text("created"),
        version=record.text("version_lit_recon"),
        n=len(record.victims),
        missing=MISSING,
    )
    write_text(record.folder.report, page)
    return record.folder.report


def grants(record: RunRecord) -> list[Grant]:
    """What the informed adversary knew, then what not."""
    known = find_setting(record.settings, "initialization") == "known"
    initial = "The initial weights that training began from"
    found = [
        Grant(True, f"All training images but one, {record.text('n_fixed')} of them, with their labels."),
        Grant(True, "The released model: its architecture, its weights, and the optimizer that trained it."),
        Grant(True, f"{record.text('n_shadow')} other images of the same shape, to train shadow models on."),
        Grant(known, f"{initial}." if known else f"{initial}: every model, released or shadow, has its own."),
        Grant(False, "The missing image and its label. They served only after the attack, to score it."),
    ]
    return sorted(found, key=lambda grant: not grant.known)
