"""Compare the measured numbers and plots of README.md and docs/ with the records, or write them anew.

python -m benchmarks.docs [--write]
"""

from __future__ import annotations

import argparse

from benchmarks.docs import examine_pages, pictures
from benchmarks.docs.figures import Figures
from benchmarks.record import ROOT


def main() -> int:
    """Print what is wrong and how much was checked; the exit code is 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace numbers and tables by those of the records")
    arguments = parser.parse_args()
    figures = Figures()
    pages = examine_pages(figures)
    if arguments.write:
        for page in pages:
            if page.text != page.found:
                page.path.write_text(page.text, encoding="utf-8")
        pages = examine_pages(figures)
        pictures.write(figures)
    old = pictures.outdated(figures)
    for name in old:
        print(f"docs/images/{name}: of other records than those in benchmarks/results; run with --write")
    for page in pages:
        for line, message in page.problems:
            print(f"{page.path.relative_to(ROOT)}:{line}: {message}")
    unmeasured = sorted({name for page in pages for name in page.unmeasured})
    print(f"{sum(page.checked for page in pages)} numbers checked against records", end=", ")
    print(f"{sum(page.quoted for page in pages)} marked as a publication's")
    print(f"{len(unmeasured)} tables not measured with the present code: {', '.join(unmeasured) or 'none'}")
    return int(any(page.problems for page in pages) or bool(old))


if __name__ == "__main__":
    raise SystemExit(main())
