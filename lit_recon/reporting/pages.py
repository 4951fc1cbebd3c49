"""Self-contained HTML pages made of panels: the report of a run or study, and the comparison of several runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lit_recon.errors import ConfigError
from lit_recon.io.files import write_bytes, write_text
from lit_recon.reporting.images import data_uri
from lit_recon.reporting.plots import HEIGHT, WIDTH, Chart, loss_chart
from lit_recon.reporting.provenance import flatten, paper_of
from lit_recon.reporting.record import RunRecord
from lit_recon.reporting.tables import Bar, Gallery, facts, gallery, rmse_bars, summary_table
from lit_recon.reporting.wording import ABSENT, MISSING, Grant, format_score, knowledge, notes, percent, verdict
from lit_recon.reporting.writing import Scalar


@dataclass(frozen=True)
class Picture:
    """A PNG or SVG image embedded in the page, and kept in the folder `figures` where it has a file name."""

    content: bytes
    description: str
    file: str = ""

    @property
    def kind(self) -> str:
        """`png` or `svg`."""
        return "png" if self.content.startswith(b"\x89PNG") else "svg"

    @property
    def address(self) -> str:
        """The picture as a data URI."""
        return data_uri(self.content, "png" if self.kind == "png" else "svg+xml")


@dataclass(frozen=True)
class TableCell:
    """A cell of a table."""

    text: str
    small: Sequence[str] = ()  # lines below the text
    mark: str = ""  # `ours` and `rival` stand out, `missing` is muted
    reason: str = ""  # shown when pointed at


@dataclass(frozen=True)
class Panel:
    """One section of a page; what is empty is left out, the rest is shown in this order."""

    title: str = ""
    lead: str = ""
    pictures: Sequence[Picture] = ()
    chart: Chart | None = None
    gallery: Gallery | None = None
    items: Sequence[str | tuple[str, str]] = ()  # of a list; a pair is a term in bold and its explanation
    code: str = ""
    header: Sequence[str] = ()  # of the table
    rows: Sequence[Sequence[str | TableCell]] = ()  # the first cell names the row
    note: str = ""  # a paragraph per line
    folded: bool = False  # show the table on demand only
    parts: Sequence[Panel] = ()  # subsections
    columns: bool = False  # side by side


@dataclass(frozen=True)
class Page:
    """The report of a run or a study."""

    kind: str  # of report, above the title
    settings: Mapping[str, object]  # nested configuration; its `name` is the title, its `paper` is cited
    facts: Mapping[str, Scalar]  # `created`, `version_lit_recon` and `command`, where known
    lead: str  # the main finding
    panels: Sequence[Panel]
    files: Mapping[str, str]  # what else the folder holds, by file name
    bars: Sequence[Bar] = ()  # of a chart beside the main finding
    bars_title: str = ""
    costs: Sequence[tuple[str, str]] = ()  # cost, machine and versions, by name

    def write(self, path: Path) -> Path:
        """Write the page, and pictures that have file names into `figures` beside it; returns the page's path.

        Of several pictures of one name, all but the first have a number in theirs.
        """
        taken = set[str]()
        for picture in _pictures(self.panels):
            if picture.file:
                write_bytes(path.parent / "figures" / _free(picture.file, taken), picture.content)
        stated = [(key, str(value)) for key, value in flatten(self.settings).items()]
        tables = [("Settings", stated), ("Cost, machine and versions", self.costs)]
        again = Panel(
            "Reproduce",
            code=str(self.facts.get("command") or ""),
            parts=[Panel(title, rows=rows, folded=True) for title, rows in tables if rows],
        )
        created = str(self.facts.get("created") or "").replace("T", " ").replace("+00:00", " UTC")
        page = _render(
            "report.html.j2",
            page=self,
            name=str(self.settings.get("name") or path.parent.resolve().name),
            paper=paper_of(self.settings),
            panels=[*self.panels, again],
            created=created,
            version=str(self.facts.get("version_lit_recon") or ""),
            chart_size=(WIDTH, HEIGHT),
        )
        write_text(path, page)
        return path


def write_pdf(page: Path) -> Path:
    """Write a page as a PDF beside it, by the style for print; returns its path. Needs the extra `pdf`."""
    try:
        from weasyprint import HTML
    except (ImportError, OSError) as error:  # the latter: its Pango library is missing
        raise ConfigError(
            f"a PDF needs weasyprint, which cannot be imported ({error}): pip install 'lit_recon[pdf]', and the system "
            "library Pango, or print the page from a browser"
        ) from error
    path = page.with_suffix(".pdf")
    write_bytes(path, HTML(filename=page).write_pdf())
    return path


def _free(name: str, taken: set[str]) -> str:
    """The name of a file, with a number before its ending where it is taken; it is taken afterwards."""
    own, number = Path(name), 1
    while name in taken:
        number += 1
        name = f"{own.stem}_{number}{own.suffix}"
    taken.add(name)
    return name


def _pictures(panels: Sequence[Panel]) -> Iterator[Picture]:
    for panel in panels:
        yield from panel.pictures
        yield from _pictures(panel.parts)


_CLIENT = "Left the client's image, in the middle what the attack reconstructed from the client's update"


def build_report(
    folder: Path | str,
    origin: str = _CLIENT,
    knowledge: Callable[[RunRecord], list[Grant]] = knowledge,
    panels: Callable[[RunRecord], list[Panel]] = lambda _: [],
) -> Path:
    """Write the page of a finished run into its folder, from the files in it alone; returns its path.

    `origin` describes the left and the middle image of every card; `panels` are shown before the images. Raises as
    `RunRecord.read` does.
    """
    record = RunRecord.read(Path(folder))
    n, chart = len(record.victims), loss_chart(record.losses)
    page = Page(
        kind="Reconstruction report",
        settings=record.settings,
        facts=record.metrics,
        lead=verdict(record),
        bars=rmse_bars(record),
        bars_title=f"RMSE of pixels in [0, 1]{f', mean over {n} images' if n > 1 else ''}; shorter is better",
        panels=[
            *panels(record),
            _images(record, origin),
            Panel(parts=[_metrics(record), *([_losses(record, chart)] if chart else [])], columns=True),
            *_bounds(record),
            knowledge_panel(knowledge(record)),
            *notes_panels(notes(record)),
        ],
        files={
            "metrics.json": "all metrics",
            "victims.csv": "the metrics of every image",
            "reconstructions.safetensors": "the images",
            "config.yaml": "the settings",
        },
        costs=facts(record),
    )
    return page.write(record.folder.report)


def knowledge_panel(grants: Sequence[Grant]) -> Panel:
    """What the attacker knew and did not know, side by side."""
    columns = (("Known", True), ("Unknown", False))
    return Panel(
        "What the attacker knew",
        parts=[Panel(title, items=[text for known, text in grants if known == wanted]) for title, wanted in columns],
        columns=True,
    )


def notes_panels(notes: Sequence[str]) -> list[Panel]:
    """The notes of a run; no panel without any."""
    return [Panel("Notes", items=notes)] if notes else []


_NEAREST = (
    ", on the right the public image with the smallest RMSE to the target image. ✓: the reconstruction has a smaller "
    "RMSE than that public image; ✗: it has not."
)
_CERTIFIED = (
    " Certified: the reconstruction passed a test that the attack makes without the true images: strong evidence, no "
    "proof."
)


def _images(record: RunRecord, origin: str) -> Panel:
    cards = gallery(record)
    together = " The images of a batch were attacked together, from one update." if len(cards.groups) > 1 else ""
    judged = _CERTIFIED if any(row.certified is not None for row in record.victims) else ""
    return Panel("Images", f"{origin}{_NEAREST if cards.public else '.'}{judged}{together}", gallery=cards)


def _metrics(record: RunRecord) -> Panel:
    summary, printed = summary_table(record), bool(paper_of(record.settings).values)
    n = len(record.victims)
    known = _certified(record, 4 if printed else 3)
    interval = ", and the 95 % confidence interval of the mean, with batches taken as independent"
    return Panel(
        "Metrics",
        f"{'Of the one image' if n == 1 else f'Mean ± standard deviation over {n} images'}"
        f"{interval if any(row.interval for row in summary) else ''}; ↓: lower is better, ↑: higher is better. Two "
        "baselines that do not use the update: the mean of all public images, and the public image nearest to the "
        "target image, which can be chosen only with the target image at hand.",
        header=["Metric", "This run", "Mean public image", "Nearest public image", *(["Paper"] if printed else [])],
        rows=known
        + [
            [
                f"{row.measure.name}\N{NO-BREAK SPACE}{row.measure.better}",
                TableCell(
                    row.ours,
                    [f"{what} {text}" for what, text in (("±", row.spread), ("95 %:", row.interval)) if text],
                    "missing" if row.ours == MISSING else "ours",
                ),
                row.mean_image,
                row.nearest_public,
                *([row.paper] if printed else []),
            ]
            for row in summary
        ],
        note="\n".join(reason for row in summary for reason in row.reasons),
    )


def _bounds(record: RunRecord) -> list[Panel]:
    """Lower bounds on the error of attacks; none where not asked for."""
    if record.number("bound_clients") is None:
        return []
    keys = ("rmse", "bound_rmse", "bound_independent_rmse", "bound_public_rmse")
    error = record.number("bound_relative_error")
    shown = [row for row in record.victims if row.scores.get("bound_public_rmse") is not None]
    reason = record.text("bound_rmse_reason")
    return [
        Panel(
            "Lower bounds on the error",
            "Root mean squared error of a pixel of the client's images, from the Fisher information in the update at "
            "these images, with known labels and the activations of these images. Unbiased attacks (Cramér-Rao): "
            "without any prior; an attack that uses one, or clips pixels to [0, 1], may come below. With a prior (van "
            "Trees): attacks that know that pixels are independent, with a standard deviation of 0.25, or that images "
            "have the covariance of the public images; an attack that knows more about images may come below. The "
            "latter bound the mean over all images, with the information at these in the place of its mean."
            f"{'' if error is None else f' Rounding changes the first by about {percent(error)}.'}",
            header=["Image", "Attack", "Unbiased attacks", "Independent pixels", "Like public images"],
            rows=[[f"#{row.id}", *(format_score("rmse", row.scores.get(key)) for key in keys)] for row in shown],
            note=f"Unbiased attacks have no bound: {reason}." if reason else "",
        )
    ]


def _certified(record: RunRecord, others: int) -> list[Sequence[str | TableCell]]:
    """The share of certified images as a row of the metrics' table with `others` more columns, if there is one."""
    share, known = record.number("certified_rate"), sum(row.certified is True for row in record.victims)
    if share is None:
        return []
    ours = TableCell(percent(share), [f"{known} of {len(record.victims)}"], "ours")
    return [["Images certified\N{NO-BREAK SPACE}↑", ours, *[ABSENT] * (others - 1)]]


def _losses(record: RunRecord, chart: Chart) -> Panel:
    restarts = len({curve.restart for curve in record.losses})
    return Panel(
        "Loss",
        f"The attack's objective over its steps; one line per batch{' and restart' if restarts > 1 else ''}"
        f"{', logarithmic' if chart.logarithmic else ''}.",
        chart=chart,
    )


def compare_report(folders: Sequence[Path | str], out: Path | str) -> Path:
    """Write a page that compares finished runs in the given order and links to their own pages; returns its path.

    ConfigError for fewer than two runs, or if `out` is no `.html` file; otherwise raises as `RunRecord.read` does.
    """
    from lit_recon.reporting.comparison import compare  # attacks write pages without it

    target = Path(out)
    if len(folders) < 2:
        raise ConfigError(f"a comparison needs two runs or more; got {len(folders)}: name more run folders")
    if target.suffix.lower() != ".html" or target.is_dir():
        raise ConfigError(f"the comparison is written to an .html file; got {target}: name one, e.g. comparison.html")
    records = [RunRecord.read(Path(folder)) for folder in folders]
    pages = [quote(os.path.relpath(record.folder.report, target.parent)) for record in records]
    write_text(target, _render("compare.html.j2", comparison=compare(records), pages=pages, absent=ABSENT))
    return target


def _render(template: str, **content: object) -> str:
    pages = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return pages.get_template(template).render(content)
