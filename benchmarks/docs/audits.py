"""Tables of audits of updates that real federations sent."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.docs.figures import Content, shown
from benchmarks.docs.tables import markdown, metrics_of, row_of, table

_PREFIX = "audit_flower_"
#: Names of `benchmarks.flower.app.CASES`, and of changes to what the audit is told, in the order of the page.
_FLOWER = {
    "eight_images": "`8` images, one epoch",
    "one_epoch": "`32` images, one epoch",
    "wrong_lr": "the same, learning rate given as `0.3` instead of `0.1`",
    "five_epochs": "`32` images, five epochs",
    "momentum": "the same with momentum `0.9`",
    "buffers": "`32` images, BatchNorm, whose buffers are sent",
}


@table("audit_flower", f"{_PREFIX}**")
def audit_flower(records: Sequence[Content]) -> str:
    own = {record["name"].removeprefix(_PREFIX): record for record in records}
    rows = []
    for name, title in _FLOWER.items():
        if name not in own:
            continue
        found = metrics_of(own[name])
        rows.append(
            [
                title,
                found["doubts"].replace("|", "") or "none",
                f"`{found['attack']}`",
                f"{found['n_certified']} of {found['n_images']}",
                shown(found["rmse"]),
                shown(found["baseline_mean_color_rmse"]),
                shown(row_of(own[name])["seconds"], ".0f"),
            ]
        )
    header = ["update", "what does not agree", "attack believed", "certified", "RMSE", "mean colors", "seconds"]
    return markdown(header, rows)
