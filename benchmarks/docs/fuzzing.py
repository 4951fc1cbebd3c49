"""Table of the nightly fuzzing."""

from __future__ import annotations

from benchmarks.docs.figures import Content, shown
from benchmarks.docs.tables import markdown, table


@table("fuzzing", "fuzzing")
def fuzzing(record: Content) -> str:
    rows = [
        [
            f"`{row['reader']}`",
            row["kind"],
            f"{row['inputs']:,}",
            f"{row['valid'] / max(1, row['inputs']):.0%}",
            f"{row['refused'] / max(1, row['inputs']):.0%}",
            str(row["crashes"]),
            str(row["hangs"]),
            str(row["wrong"]),
            shown(row["seconds"], ".0f"),
        ]
        for row in record["rows"]
    ]
    header = ["reader", "input", "inputs", "read", "refused", "crashes", "hangs", "wrong results", "seconds"]
    return markdown(header, rows)
