"""Runs the pieces of a study that have no result yet; failures are listed, and tried again by the next call."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lit_recon.errors import ConfigError, LitReconError, RunExistsError
from lit_recon.experiments.configuration import SAME_RUN
from lit_recon.experiments.engine.pieces import Piece, PieceOutcome, attempt
from lit_recon.experiments.pages import build_page, lacks_page
from lit_recon.io.files import write_text
from lit_recon.reporting.provenance import differences, read_settings
from lit_recon.reporting.record import read_json, read_metrics
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.wording import duration
from lit_recon.training.trainer import TrainerSettings

#: Settings that say where pieces are run; they may change between two calls on one folder.
WHERE = ("cluster", "piece_cpus", "piece_gpus")


class Executor(Protocol):
    """Runs pieces, one or several at a time."""

    def submit(self, piece: Piece) -> None:
        """Queue a piece; all pieces that it needs are finished."""

    def next(self) -> tuple[Piece, PieceOutcome]:
        """Wait for any of the submitted pieces to end.

        Raises:
            Interrupted: after SIGINT or SIGTERM; running pieces have saved their state.
        """


class ThisProcess:
    """Runs one piece of the study in `folder` after the other in this process."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._queue = folder, deque[Piece]()

    def submit(self, piece: Piece) -> None:
        self._queue.append(piece)

    def next(self) -> tuple[Piece, PieceOutcome]:
        piece = self._queue.popleft()
        return piece, attempt(piece, self._folder.path, self._folder.log(piece.folder))


class StudyRunner:
    """The pieces of a study, in the order in which they are to be run, and its folder."""

    def __init__(self, pieces: Iterable[Piece], path: Path) -> None:
        self.pieces, self.folder = list(pieces), RunFolder(path)

    def open(
        self,
        config: str,
        overwrite: bool,
        grows: Sequence[str],
        set_aside: dict[str, str] | None = None,
        reopen: bool = False,
    ) -> None:
        """Create or reopen the study's folder; arguments and errors as for `RunFolder.open`.

        The settings `grows` may change between two calls on one folder: finished pieces are kept, new ones are run.
        `set_aside` holds by folder of a piece why it is not applicable. With `reopen` a study goes on although all of
        its pieces are finished.
        """
        aside = set_aside or {}
        unfinished = not all(self.is_settled(piece) or piece.folder in aside for piece in self.pieces)
        RunFolder.open(self.folder.path, config, overwrite, (*SAME_RUN, *WHERE, *grows), reopen=reopen or unfinished)
        for folder, reason in aside.items():
            self._note(folder, PieceOutcome(reason=reason, applicable=False))

    def is_done(self, piece: Piece) -> bool:
        return piece.is_done(self.folder.path)

    def is_settled(self, piece: Piece) -> bool:
        """Whether there is nothing to run: the piece has its result, or it is not applicable."""
        path = self.folder.failure(piece.folder)
        if self.is_done(piece) or not path.is_file():
            return self.is_done(piece)
        return not read_json(path, "delete it, and the run is tried again").get("applicable", True)

    def progress(self) -> str:
        """The numbers of all, finished and not applicable pieces, as text."""
        done = sum(map(self.is_done, self.pieces))
        aside = sum(map(self.is_settled, self.pieces)) - done
        return f"{len(self.pieces)} runs, {done} of them done" + (f", {aside} not applicable" if aside else "")

    def run(self, executor: Executor) -> list[Piece]:
        """Run every piece that is not settled, once, each after those that it needs; Interrupted after a signal.

        Returns the pieces without a result: those that failed or are not applicable, and those that need one of them.
        Finished pieces get the pages that they lack: those of processes that were killed just before.
        """
        waiting = [piece for piece in self.pieces if not self.is_settled(piece)]
        unfinished = {piece.folder for piece in waiting}
        running: list[Piece] = []
        made: dict[str, int] = {}  # how much of what pieces share ended ones have made for the others
        failed: list[Piece] = []
        while waiting or running:
            for piece in list(waiting):
                being_made = {name for other in running for name, n in other.shares.items() if n > made.get(name, 0)}
                lacking = {name for name, n in piece.shares.items() if n > made.get(name, 0)}
                if lacking.isdisjoint(being_made) and unfinished.isdisjoint(piece.needs):
                    waiting.remove(piece)
                    running.append(piece)
                    self.folder.failure(piece.folder).unlink(missing_ok=True)
                    executor.submit(piece)
            piece, outcome = executor.next()
            running.remove(piece)
            made.update({name: max(n, made.get(name, 0)) for name, n in piece.shares.items()})
            if self._ended(piece, outcome):
                unfinished.remove(piece.folder)
                continue
            lost = [piece]
            for each in lost:  # grows by those that need one of them
                for other in [other for other in waiting if each.folder in other.needs]:
                    waiting.remove(other)
                    self._ended(other, PieceOutcome(reason=f"it needs {each.title}, which has no result"))
                    lost.append(other)
            failed += lost
        self._write_missing_pages()
        return failed

    def require(self, failed: Sequence[Piece]) -> None:
        """Refuse to go on without the results of pieces that failed, by a ConfigError that names one."""
        if failed:
            raise ConfigError(
                f"{len(failed)} of {len(self.pieces)} runs have no result, such as {failed[0].title} (see "
                f"{self.folder.failure(failed[0].folder)}), and the page needs all of them: repeat the command, which "
                "runs only those"
            )

    def _write_missing_pages(self) -> None:
        for path in [self.folder.path / piece.folder for piece in self.pieces if self.is_done(piece)]:
            if lacks_page(path):
                try:
                    build_page(path)
                except LitReconError as error:  # its figures are there, and no others need the page
                    print(f"note        no page in {path}: {error}", flush=True)

    def _ended(self, piece: Piece, outcome: PieceOutcome) -> bool:
        """Print and record the outcome of a piece; return whether it has a result."""
        title = f"[{self.pieces.index(piece) + 1}/{len(self.pieces)}] {piece.title}"
        if not outcome.reason:
            print(f"{title}: {outcome.summary} ({duration(outcome.seconds)})", flush=True)
            return True
        path = self._note(piece.folder, outcome)
        more = f" (traceback in {path})" if outcome.traceback else ""
        said = f"FAILED, {outcome.reason}{more}" if outcome.applicable else f"not applicable, {outcome.reason}"
        print(f"{title}: {said}", flush=True)
        return False

    def _note(self, folder: str, outcome: PieceOutcome) -> Path:
        path = self.folder.failure(folder)
        content = {name: getattr(outcome, name) for name in ("reason", "applicable", "traceback")}
        write_text(path, json.dumps(content, indent=2))
        return path


def refuse_other_lpips(folder: RunFolder, cells: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse to go on, by a RunExistsError, with a study that has LPIPS values of another network or other weights.

    `cells` holds the settings of its cells by their folder; LPIPS is no part of the hash in a folder's name.
    """
    for place, own in cells.items():
        cell, asked = RunFolder(folder.path / place), own.get("lpips") or {"network": "none"}
        if asked["network"] == "none" or not cell.is_complete or read_metrics(cell.metrics).get("lpips") is None:
            continue
        there = read_settings(cell.config).get("lpips")
        if other := differences({"lpips": there}, {"lpips": asked}, ["lpips.download"]):
            raise RunExistsError(
                f"{folder.path} holds cells with another LPIPS ({'; '.join(map(str, other))}), such as {place}, and a "
                "study needs one alone: go on with the former one, choose another folder with --out, or start again "
                "with --overwrite true"
            )


def recorded_split(path: Path) -> object:
    """The hash of the images that a finished run was made on; None where there is none."""
    run = RunFolder(path)
    return read_metrics(run.metrics).get("split_hash") if run.is_complete else None


def refuse_other_data(
    folder: RunFolder, expected: Mapping[str, str], recorded: Callable[[Path], object] = recorded_split
) -> None:
    """Refuse to go on, by a RunExistsError, with a study on other images than are there now under the same settings.

    Settings name a folder, and not what it holds. `expected` are hashes of the images that are there now, by the folder
    of a piece; `recorded` reads that of a finished piece from its folder.
    """
    for place, now in expected.items():
        if (there := recorded(folder.path / place)) not in (None, now):
            raise RunExistsError(
                f"{folder.path} holds cells on other images (hash {there}, here {now}), such as {place}: the data have "
                "changed since, and a study compares results on the same images; restore the data, choose another "
                "folder with --out, or start again with --overwrite true"
            )


def refuse_several_processes(command: str, trainer: TrainerSettings | None = None) -> None:
    """Refuse torchrun, and settings that spread a piece over devices, by a ConfigError that names `--cluster`."""
    several = "--cluster local (or the address of a Ray cluster) to run several pieces at the same time"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"{command} runs in one process; torchrun started {os.environ['WORLD_SIZE']}: start it without torchrun, "
            f"and with {several}"
        )
    if trainer is not None and (trainer.devices != 1 or trainer.num_nodes != 1):
        raise ConfigError(
            f"{command} runs every piece on one device; got trainer.devices={trainer.devices} and trainer.num_nodes="
            f"{trainer.num_nodes}: leave both at 1, and use {several}"
        )
