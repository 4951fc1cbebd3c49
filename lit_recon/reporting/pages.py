"""Self-contained HTML pages: the report of one run, and the comparison of several."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lit_recon.errors import ConfigError
from lit_recon.io.files import write_text
from lit_recon.reporting.cards import gallery
from lit_recon.reporting.comparison import compare
from lit_recon.reporting.curves import HEIGHT, WIDTH, loss_chart
from lit_recon.reporting.provenance import paper_of
from lit_recon.reporting.record import RunRecord
from lit_recon.reporting.settings import flatten
from lit_recon.reporting.tables import facts, rmse_bars, summary_table
from lit_recon.reporting.wording import ABSENT, MISSING, Grant, knowledge, notes, verdict


@dataclass(frozen=True)
class Panel:
    """One section; whatever is empty is left out.

    Attributes:
        title: of the section.
        lead: what there is to see.
        pictures: `(address, description)` of each image, the address as of `picture`.
        header: of the table.
        rows: of the table, each with as many cells as the header; the first cell names the row.
        note: below the table.
        folded: whether the table is shown only on demand.
    """

    title: str
    lead: str = ""
    pictures: Sequence[tuple[str, str]] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    note: str = ""
    folded: bool = False


def picture(content: bytes, kind: str) -> str:
    """A file as an address that holds it.

    Args:
        content: of the file.
        kind: `png` or `svg`.
    """
    mime = {"png": "png", "svg": "svg+xml"}[kind]
    return f"data:image/{mime};base64,{base64.b64encode(content).decode('ascii')}"


_TEMPLATES = Path(__file__).parent / "templates"


#: What the pictures of an attack on a client's update are.
_CLIENT = "Left the client's image, in the middle what the attack made of the client's update"


def build_report(
    folder: Path | str,
    origin: str = _CLIENT,
    knowledge: Callable[[RunRecord], list[Grant]] = knowledge,
    panels: Callable[[RunRecord], list[Panel]] = lambda _: [],
) -> Path:
    """Write the page of a finished run into its folder, from the files in it alone.

    Args:
        folder: of the run.
        origin: where the left and the middle image of every victim come from.
        knowledge: what the attacker knew, then what not; default: that of an attack on a client's update.
        panels: further sections, before the images; default: none.

    Returns:
        The page's path.

    Raises:
        MissingDataError: the folder holds no finished run.
        CorruptFileError: one of its files is malformed.
    """
    record = RunRecord.read(Path(folder))
    paper = paper_of(record.settings)
    page = render(
        "report.html.j2",
        name=str(record.settings.get("name") or record.folder.path.resolve().name),
        paper=paper,
        origin=origin,
        verdict=verdict(record),
        bars=rmse_bars(record),
        summary=summary_table(record),
        gallery=gallery(record),
        panels=panels(record),
        chart=loss_chart(record.losses),
        chart_size=(WIDTH, HEIGHT),
        restarts=len({curve.restart for curve in record.losses}),
        knowledge=knowledge(record),
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


def compare_report(folders: Sequence[Path | str], out: Path | str) -> Path:
    """Write a page that compares finished runs, in the order given, and leads to their own pages.

    Args:
        folders: of two runs or more.
        out: the page to write, an `.html` file.

    Returns:
        The page's path.

    Raises:
        ConfigError: fewer than two runs, or `out` is no `.html` file.
        MissingDataError: a folder holds no finished run.
        CorruptFileError: one of its files is malformed.
    """
    target = Path(out)
    if len(folders) < 2:
        raise ConfigError(f"a comparison needs two runs or more; got {len(folders)}: name more run folders")
    if target.suffix.lower() != ".html" or target.is_dir():
        raise ConfigError(f"the comparison is written to an .html file; got {target}: name one, e.g. comparison.html")
    records = [RunRecord.read(Path(folder)) for folder in folders]
    pages = [quote(os.path.relpath(record.folder.report, target.parent)) for record in records]
    write_text(target, render("compare.html.j2", comparison=compare(records), pages=pages, absent=ABSENT))
    return target


def render(template: str, **content: object) -> str:
    """A page from one of the room's templates."""
    pages = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return pages.get_template(template).render(content)
