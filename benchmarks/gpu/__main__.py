"""All measurements that need a GPU, by one command and within a time.

    python -m benchmarks.gpu [--minutes 8] [--images FILE.npz] [--backbone FILE.safetensors] [--out DIR]

agreement    updates, derivatives and reconstructions beside the CPU's, float32 without TF32
throughput   seconds per attack iteration at batch 1, 8 and 32: eager, recorded as a CUDA graph, compiled
together     one victim against many at once: one after the other or under vmap
cells        the settings under configs/attack on real victims, resumable: call again with the same --out

A record goes to benchmarks/results. On a machine without a GPU the command says so and exits with 0. A rehearsal of
every section there, in tiny sizes whose figures mean nothing, is

    python -m benchmarks.gpu --device cpu --quick

Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import lit_recon._torchvision

import torch

from benchmarks.gpu.plan import Plan
from benchmarks.gpu.sections import SECTIONS, Section
from benchmarks.record import RESULTS, ROOT, Record, Row

#: Beyond its deadline a section may end what it is at.
GRACE_SECONDS = 10


def main(given: Sequence[str] | None = None) -> int:
    """Measure and record; returns the exit code."""
    parser = _parser()
    arguments = parser.parse_args(given)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here, nothing to measure; --device cpu --quick rehearses every section on the CPU")
        return 0
    for file in (arguments.images, arguments.backbone):
        if file is not None and not file.is_file():
            parser.error(f"{file} is not there")
    sections = [section for section in SECTIONS if section.name in arguments.sections]
    plan = Plan(
        device=arguments.device,
        quick=arguments.quick,
        out=arguments.out.resolve(),
        deadline=time.time() + 60 * arguments.minutes,
        images=arguments.images and arguments.images.resolve(),
        backbone=arguments.backbone and arguments.backbone.resolve(),
        options=tuple(arguments.set),
    )
    rehearsal = arguments.quick or not plan.on_gpu
    folder = plan.out if rehearsal else RESULTS
    with Record("gpu", vars(arguments), "evaluation", arguments.device, folder) as record:
        for row in run_sections(plan, sections):
            record.add(row, show=False)  # its section has shown it
    return 0


def run_sections(plan: Plan, sections: Sequence[Section]) -> Iterator[Row]:
    """Rows of all sections; each ends with a row about the section itself."""
    began, shares = time.time(), sum(section.share for section in sections)
    total, used = plan.left(), 0.0
    for section in sections:
        used += section.share
        yield from run_section(plan.until(began + total * used / shares), section.name)


def run_section(plan: Plan, name: str, module: str = "benchmarks.gpu.sections") -> list[Row]:
    """Rows of one section, those included that it wrote before it failed or ran out of time."""
    plan.rows.mkdir(parents=True, exist_ok=True)
    written, errors = plan.rows / f"{name}.jsonl", plan.rows / f"{name}.err"
    written.unlink(missing_ok=True)
    began = time.monotonic()
    with errors.open("w", encoding="utf-8") as stream:
        # a session of its own, so that what it starts ends with it
        process = subprocess.Popen(
            [sys.executable, "-m", module, name, plan.dumps()], cwd=ROOT, stderr=stream, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout=max(0.0, plan.left()) + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    end: Row = {"section": name, "seconds": round(time.monotonic() - began, 1)}
    if code is None:
        end["stopped"] = "out of time"
    elif code != 0:
        end["failed"] = _last_line(errors)
    print(json.dumps(end), flush=True)
    lines = written.read_text(encoding="utf-8").splitlines() if written.is_file() else []
    return [*(row for line in lines for row in _parsed(line)), end]


def _parser() -> argparse.ArgumentParser:
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything; what does not fit is said")
    parser.add_argument("--images", type=Path, help="real images for the cells, e.g. CIFAR-10 as .npz")
    parser.add_argument("--backbone", type=Path, help="trained on them; default: one is trained for one epoch")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of rows, logs and run folders")
    parser.add_argument("--sections", nargs="+", default=names, choices=names)
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of attack.py run for every cell"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to rehearse")
    return parser


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a section and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(timeout=GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue


def _parsed(line: str) -> list[Row]:
    """The row of a line; none if its writer was killed within it."""
    try:
        return [json.loads(line)]
    except ValueError:
        return []


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:400] if lines else "ended without a word"


if __name__ == "__main__":
    raise SystemExit(main())
