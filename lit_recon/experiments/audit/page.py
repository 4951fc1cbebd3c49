"""The report of an audit, from the files of its run folder alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_recon.reporting.images import image_grid
from lit_recon.reporting.pages import Page, Panel, Picture, TableCell
from lit_recon.reporting.provenance import read_settings
from lit_recon.reporting.record import read_arrays, read_json, read_metrics
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.wording import MISSING, duration, format_score, short

#: Findings, attacks and defenses of an audit.
AUDIT_FILE = "audit.json"

#: Largest RMSE of a certified image from the true one up to which the report says that it came back.
_CAME_BACK = 0.05
_SHOWN = 16
_KINDS = {"fits": "agrees", "found": "worked out", "doubt": "does not agree", "open": "not checked"}
_MEANING = """\
An image that came back can be seen by everyone who sees this update: the server, and whoever listens or stores it. A \
certified image passed the attack's own test, which uses the update alone: strong evidence, not a proof.
An attack that failed proves nothing: another attack, more time, or more knowledge may succeed. This report is no \
statement that the update is anonymous. The yardstick of European data protection law is whether personal data can be \
obtained by all the means reasonably likely to be used, with more than an insignificant likelihood (EDPB Opinion \
28/2024, on recital 26 GDPR); the code of the attacks listed here is public, and they take minutes on an ordinary \
computer.
A defense that stopped these attacks was measured on this update alone, against an attacker who knows the defense. \
What it costs in accuracy is measured by attack.py evaluate."""


def write_page(folder: Path) -> Path:
    """Write the report of a finished audit into its folder; returns its path. Errors as for `RunRecord.read`."""
    run = RunFolder(folder)
    run.require_finished()
    metrics, audit = read_metrics(run.metrics), read_json(folder / AUDIT_FILE)
    arrays = read_arrays(run.reconstructions) if run.reconstructions.is_file() else {}
    files = {
        "config.yaml": "the settings, which repeat the audit",
        "metrics.json": "the figures",
        AUDIT_FILE: "all findings",
    }
    page = Page(
        kind="Audit of a client's update",
        settings=read_settings(run.config),
        facts=metrics,
        lead=verdict(metrics),
        panels=[
            _images(arrays, metrics),
            _checks(audit["findings"]),
            _attacks(audit["attacks"], metrics),
            *_protection(audit["protection"]),
            Panel("What this means, and what it does not", note=_MEANING),
        ],
        files=files | ({"reconstructions.safetensors": "the images"} if arrays else {}),
        costs=[("processor", str(metrics.get("device"))), ("time", duration(float(metrics.get("seconds") or 0.0)))],  # type: ignore[arg-type]  # a number
    )
    return page.write(run.report)


def verdict(metrics: Mapping[str, Any]) -> str:
    """The main finding in sentences."""
    n, certified = int(metrics["n_images"]), int(metrics["n_certified"] or 0)
    every = "The image" if n == 1 else f"All {n} images"
    if metrics.get("attack") is None:
        return (
            f"No attack that was tried returned the {n} image{'s' * (n > 1)} of this update. That is no proof that "
            "they cannot be recovered."
        )
    rmse, plain = metrics.get("rmse"), metrics.get("baseline_mean_color_rmse")
    worst = metrics.get("rmse_worst", rmse)  # audits of earlier releases have the mean alone
    wrong = isinstance(worst, float) and not worst <= _CAME_BACK
    if certified == n and not wrong:
        return f"{every} of this update came back, and the attacker knows it: every one is certified."
    some = f"{certified} of {n} images of this update came back certified. " if certified else ""
    if certified == n:
        some = (
            f"{every} that came back passed the attack's own test (certified), but "
            f"the largest RMSE from a true image is {format_score('rmse', worst)}. "
        )
    if isinstance(rmse, float) and isinstance(plain, float):
        closer = "closer to" if rmse < plain else "no closer to"
        return (
            f"{some}The images that came back are {closer} the true ones than plain images of their "
            f"mean color: RMSE {format_score('rmse', rmse)} instead of {format_score('rmse', plain)}."
        )
    return (
        f"{some}Images came back whose update differs from the observed one by {short(float(metrics['distance']))} "
        "(one minus the cosine). Without the true images it is not known how close they are."
    )


def _images(arrays: Mapping[str, NDArray[np.float32]], metrics: Mapping[str, Any]) -> Panel:
    title = "What came back"
    if "reconstructions" not in arrays:
        return Panel(title, "Nothing: no attack returned images.")
    images = {"came back": arrays["reconstructions"][:_SHOWN]}
    if "targets" in arrays:
        images = {"true": arrays["targets"][:_SHOWN], **images}
    n = len(arrays["reconstructions"])
    picture = Picture(
        image_grid(images, columns=8), "images that came back, beside the true ones if given", "images.png"
    )
    rows = [
        [
            f"image {number + 1}",
            f"{int(arrays['recovered_labels'][number])}",
            _yes(arrays, "certified", number),
            format_score("rmse", float(arrays["rmse"][number])) if "rmse" in arrays else MISSING,
        ]
        for number in range(n)
    ]
    shown = f"The first {_SHOWN} of {n} images. " if n > _SHOWN else ""
    return Panel(
        title,
        f"{shown}Chosen among the attacks by what the attacker sees: certificates first, then how well the update is "
        "explained.",
        pictures=[picture],
        header=["", "label", "certified", "RMSE"],
        rows=rows,
        folded=n > 8,
    )


def _yes(arrays: Mapping[str, NDArray[np.float32]], name: str, number: int) -> str:
    return MISSING if name not in arrays else ("yes" if arrays[name][number] else "no")


def _checks(findings: Sequence[Mapping[str, str]]) -> Panel:
    return Panel(
        "What was sent, and does it agree with what was claimed?",
        "Worked out from the model, the weights before and what was sent, without any image.",
        items=[(_KINDS[one["kind"]], one["text"]) for one in findings],
    )


def _attacks(attacks: Sequence[Mapping[str, Any]], metrics: Mapping[str, Any]) -> Panel:
    n = int(metrics["n_images"])
    done = [one for one in attacks if one["distance"] is not None]
    rows = [
        [
            one["title"],
            one["needs"],
            TableCell(f"{one['certified']} of {n}", mark="ours" if one["name"] == metrics["attack"] else ""),
            short(one["distance"]),
            format_score("rmse", one["rmse"]),
            duration(one["seconds"]),
        ]
        for one in done
    ]
    rest = [(one["title"], one["reason"]) for one in attacks if one["distance"] is None]
    parts = [Panel("Not tried, or not applicable", items=rest)] if rest else []
    notes = [f"{one['title']}: {note}" for one in done for note in one["notes"]]
    if notes:
        parts.append(Panel("Notes of the attacks", items=notes))
    return Panel(
        "The attacks",
        "Every attacker has the model, its weights and the update. The misfit of the update is one minus the cosine "
        "between the update of the images found and the observed one: the attacker sees it, the RMSE only we do.",
        header=["attack", "needs besides", "certified", "misfit of the update", "RMSE", "time"],
        rows=rows,
        parts=parts,
    )


def _protection(protection: Sequence[Mapping[str, Any]]) -> list[Panel]:
    if not protection:
        return []
    rows = [
        [
            own["title"],
            own["strength"],
            TableCell(_outcome(own), mark="" if own["stopped"] is not None else "missing", reason=own["reason"]),
            own["attack"] or MISSING,
            format_score("rmse", own["rmse"]),
        ]
        for own in protection
    ]
    known = all(own.get("known", True) for own in protection)
    title = "Which defense would have stopped them?" if known else "Which defense would have changed what came back?"
    lead = (
        "The same update, defended before it left the client, and attacked again by an attacker who knows the defense, "
        "with the attacks that had found something and those that were not tried. "
        f"{'Stopped' if known else 'Changed'}: what came back is no closer to the images above (the true ones if "
        "given) than plain images of their mean color."
    )
    if not known:
        lead += " Without true images, or certificates of all, it is not known whether those above are the client's."
    return [
        Panel(
            title,
            lead,
            header=["defense", "strength", "", "best attack", "RMSE"],
            rows=rows,
        )
    ]


def _outcome(own: Mapping[str, Any]) -> str:
    certified = f", {own['certified']} certified" if own["certified"] and own["stopped"] is False else ""
    return f"{effect(own['stopped'], own.get('cut', False), own.get('known', True))}{certified}"


def effect(stopped: bool | None, cut: bool, known: bool = True) -> str:
    """Whether a defense stopped the attacks, in words; not `known`: nor whether they had found the client's images."""
    if stopped is None:
        return "not measured"
    yes, no = ("stopped", "not stopped") if known else ("changed what came back", "much the same came back")
    return f"{yes}{' in the time there was' * cut}" if stopped else no
