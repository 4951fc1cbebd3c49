"""Tables of audits of recorded updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.docs.figures import Content, shown
from benchmarks.docs.tables import markdown, metrics_of, row_of, table

#: Names of `benchmarks.flower.app.CASES`, and of changes to what the audit is told, in the order of the page.
_FLOWER = {
    "eight_images": "`8` images, one epoch",
    "one_epoch": "`32` images, one epoch",
    "wrong_lr": "the same, learning rate given as `0.3` instead of `0.1`",
    "five_epochs": "`32` images, five epochs",
    "momentum": "the same with momentum `0.9`",
    "buffers": "`32` images, BatchNorm, whose buffers are sent",
    "adam": "`8` images, one step of Adam",
    "adam_five_epochs": "the same, five epochs",
}


#: Networks of `benchmarks.architectures`, recorded by a plain loop.
_TORCHVISION = {
    "resnet_18_64x64_1_frozen": "ResNet-18, one photograph, `64x64`",
    "resnet_18_224x224_1_frozen": "ResNet-18, one photograph, `224x224`",
}


def _audits(records: Sequence[Content], prefix: str, titles: Mapping[str, str]) -> str:
    own = {record["name"].removeprefix(prefix): record for record in records}
    rows = []
    for name, title in titles.items():
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


@table("audit_flower", "audit_flower_**")
def audit_flower(records: Sequence[Content]) -> str:
    return _audits(records, "audit_flower_", _FLOWER)


@table("audit_torchvision", "audit_resnet_**")
def audit_torchvision(records: Sequence[Content]) -> str:
    return _audits(records, "audit_", _TORCHVISION)
