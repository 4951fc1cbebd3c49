"""Marks in Markdown pages that say where a number is from, as comments that a rendered page does not show.

After one or more numbers in prose or in a cell:

    has 0.0014 <!-- = mnist_small: metrics.mse .4f --> on average    an expression of `figures` for each last number
    prints 0.15 to 0.17 <!-- paper: table 4 -->                      numbers of the sentence or cell, from a publication

Around lines that a function of `tables` makes:

    <!-- table: NAME -->
    ...
    <!-- end -->

Every other number with a decimal point, percent sign, exponent or unit has to be a setting in backticks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.docs.figures import FigureError, Figures

#: Lines of a table by its name, on a page.
Maker = Callable[[str, Figures, Path], str]

NOT_MEASURED = "Not measured with the present code."
NUMBER = re.compile(r"(?<![\w.])(?<!\w-)[-+−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+−]?\d+)?(?: ?%)?")
_TABLE = re.compile(r"<!-- table: (?P<name>[\w-]+) -->\n(?P<lines>.*?)<!-- end -->", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_MARK = re.compile(r"<!-- (?P<kind>=|paper:) (?P<text>.*?) -->", re.DOTALL)
_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_BLOCK_COMMENT = re.compile(r"(?<= # ).*")
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_TARGET = re.compile(r"(?<=\])\([^)]*\)")
_CONFIDENCE = re.compile(r"9[059](?:\.9)? %(?=\s(?:confidence\s)?intervals?\b)")
#: Where the sentence or cell before a mark may begin.
_BEGINNING = re.compile(r"\n\s*\n|\n(?=\||[-*] )|\||[.:;!?](?=\s)")

_TIME = r"(?:(?:milli)?seconds?|min(?:utes?)?|hours?|days?)"
#: Units that make a figure of an integer.
_UNIT = re.compile(rf"[\s-](?:m?s|{_TIME}|dB|[KMGT]i?B|[GT]FLOPs?|points|percent)\b")
#: Counts that are results.
_COUNT = re.compile(r"(?<![\w.])\d[\d,]*\sof\s\d[\d,]*(?![\w.])")
_WORD = "(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|fifteen|twenty|thirty|forty|fifty|half)"
_DURATION = re.compile(
    rf"\b(?:{_WORD}(?:\s(?:or|to|and|an?|{_WORD}))*\s{_TIME}|an?\s(?:minute|hour|day))\b", re.IGNORECASE
)


@dataclass
class Page:
    """One page: its text as the records want it, what is wrong with the text it has, and counts.

    Args:
        path: of the page.
        found: its text.
        text: with all numbers and tables from records.
        problems: `(line, message)`.
        checked: how many numbers are read from records.
        quoted: how many are from publications.
        unmeasured: names of the tables that lack a record.
    """

    path: Path
    found: str
    text: str
    problems: list[tuple[int, str]] = field(default_factory=list)
    checked: int = 0
    quoted: int = 0
    unmeasured: list[str] = field(default_factory=list)


def examine(path: Path, figures: Figures, make: Maker) -> Page:
    """Compare a page with the records."""
    text = path.read_text(encoding="utf-8")
    page = Page(path, text, text)
    replacements = [*_tables(page, figures, make), *_inline(page, figures)]
    for start, end, new in sorted(replacements, reverse=True):
        page.text = page.text[:start] + new + page.text[end:]
    page.problems.sort()
    return page


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _blank(pattern: re.Pattern[str], text: str) -> str:
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match.group(0)), text)


def _tables(page: Page, figures: Figures, make: Maker) -> Iterator[tuple[int, int, str]]:
    """Lines to replace between the marks of tables."""
    for match in _TABLE.finditer(_blank(_BLOCK, page.found)):
        line = _line(page.found, match.start())
        try:
            wanted = make(match["name"], figures, page.path)
        except FigureError as error:
            page.problems.append((line, f"table {match['name']}: {error}"))
            continue
        if NOT_MEASURED in wanted:
            page.unmeasured.append(match["name"])
        page.checked += len(NUMBER.findall(_prose(wanted)))
        lines = f"\n{wanted}\n\n"
        if lines != (found := page.found[slice(*match.span("lines"))]):
            pairs = zip((*lines.splitlines(), "the end"), (*found.splitlines(), "the end"), strict=False)
            n, (new, old) = next((n, pair) for n, pair in enumerate(pairs, start=1) if pair[0] != pair[1])
            page.problems.append((line + n, f"table {match['name']}: expected {new!r}, found {old!r}"))
            yield (*match.span("lines"), lines)


def _inline(page: Page, figures: Figures) -> Iterator[tuple[int, int, str]]:
    """Numbers to replace in prose. Numbers without a mark are problems."""
    text = _blank(_CODE, _blank(_TABLE, _blank(_BLOCK, page.found)))
    prose = _prose(text)
    covered: set[int] = set()
    before = 0
    for mark in _COMMENT.finditer(text):
        line, known = _line(text, mark.start()), _MARK.fullmatch(mark.group(0))
        if known is None:
            page.problems.append((line, f"unknown mark {mark.group(0)}"))
            continue
        beginning = max([before, *(m.end() for m in _BEGINNING.finditer(prose, before, mark.start()))])
        tokens = list(NUMBER.finditer(prose, beginning, mark.start()))
        before = mark.end()
        if known["kind"] == "paper:":
            page.quoted += len(tokens)
            covered.update(range(beginning, mark.start()))
            continue
        expressions = known["text"].split(";")
        tokens = tokens[-len(expressions) :]
        if len(tokens) < len(expressions):
            page.problems.append((line, f"{len(expressions)} expressions after {len(tokens)} numbers"))
            continue
        for expression, token in zip(expressions, tokens, strict=True):
            covered.update(range(*token.span()))
            page.checked += 1
            line = _line(text, token.start())
            try:
                wanted = figures.text(expression)
            except FigureError as error:
                page.problems.append((line, str(error)))
                continue
            if wanted != token.group(0):
                page.problems.append((line, f"{expression.strip()}: expected {wanted}, found {token.group(0)}"))
                yield (*token.span(), wanted)
    for start, end in _claims(page.found, prose):
        if covered.isdisjoint(range(start, end)):
            claim = " ".join(page.found[start:end].split())
            page.problems.append((_line(text, start), f"no record for {claim}: mark it, or put a setting in backticks"))


def _prose(text: str) -> str:
    """The text at the same positions, without code, link targets and comments."""
    for pattern in (_CODE, _TARGET, _COMMENT):
        text = _blank(pattern, text)
    return text


def _claims(text: str, prose: str) -> Iterator[tuple[int, int]]:
    """Where figures and durations are in the prose, and durations in the comments of code blocks."""
    prose = _blank(_CONFIDENCE, prose)
    for number in NUMBER.finditer(prose):
        if set(number.group(0)) & set(".%e") or _UNIT.match(prose, number.end()):
            yield number.span()
    yield from (match.span() for pattern in (_COUNT, _DURATION) for match in pattern.finditer(prose))
    for block in _BLOCK.finditer(text):
        for note in _BLOCK_COMMENT.finditer(text, *block.span()):
            yield from (match.span() for match in _DURATION.finditer(text, *note.span()))
            for number in NUMBER.finditer(text, *note.span()):
                if _UNIT.match(text, number.end()):
                    yield number.span()
