"""`train.py backbone`: train a classifier and save it for later attacks."""

from __future__ import annotations

from jsonargparse import ArgumentParser, Namespace

from lit_recon.errors import CorruptFileError
from lit_recon.experiments.call import Call
from lit_recon.experiments.configuration import SAME_RUN, settings_parser
from lit_recon.experiments.settings import BackboneSettings, TrainSettings
from lit_recon.experiments.victim_model import prepare_training
from lit_recon.models import load_backbone
from lit_recon.modules.loggers import finish
from lit_recon.reporting.provenance import environment
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.stopwatch import Stopwatch
from lit_recon.reporting.writing import write_metrics
from lit_recon.training.module import BACKBONE_FILE, UTILITY_FILE, Metrics, read_utility
from lit_recon.training.trainer import check_trainer, configure_process, is_first_process

#: Settings of an attack's backbone that do not apply to a training.
_SKIPPED = {"checkpoint", "cache"}
#: [Liu2025], appendix F.
_EPOCHS = 200


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    settings = settings_parser(program, "Train a classifier to be attacked.", TrainSettings)
    settings.add_class_arguments(BackboneSettings, as_group=False, skip=_SKIPPED)
    settings.set_defaults(epochs=_EPOCHS)
    return settings


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Validate the settings, then train or resume an interrupted training."""
    call = Call(arguments, values, "backbone")
    settings, backbone, folder = call.settings(TrainSettings), call.settings(BackboneSettings), call.folder
    configure_process(settings.trainer)
    processes = check_trainer(settings.trainer).processes
    training = prepare_training(backbone, settings.data, settings.seed, processes=processes)
    check_trainer(settings.trainer, training.precision)
    exported = folder.path / BACKBONE_FILE
    if is_first_process():
        RunFolder.open(folder.path, call.config, settings.overwrite, SAME_RUN)
        if settings.overwrite:
            exported.unlink(missing_ok=True)
            (folder.path / UTILITY_FILE).unlink(missing_ok=True)
        public, test = training.data.train, training.data.test
        print(f"data        {public.name} ({len(public)} images), {test.name} ({len(test)} images)")
        print(*training.notes, f"run folder  {folder.path}", sep="\n", flush=True)
    with Stopwatch(folder, is_first_process()) as watch:
        if exported.is_file() and not settings.overwrite:  # killed between the last two files
            checkpoint = load_backbone(exported)
            healthy = all(value.isfinite().all() for value in checkpoint.model.state_dict().values())
            if not healthy and read_utility(folder.path).get("accuracy") is not None:
                raise CorruptFileError(
                    f"{exported} holds NaN or infinite weights, but {UTILITY_FILE} beside it an accuracy: start again "
                    "with --overwrite true"
                )
        else:
            loggers = call.loggers()
            checkpoint = training.run(folder.path, settings.trainer, loggers)
            finish(loggers)
        if is_first_process():
            utility = read_utility(folder.path)
            facts: Metrics = {"epochs": checkpoint.epoch, "split_hash": checkpoint.split_hash, "seed": settings.seed}
            write_metrics(folder, {**utility, **facts, "seconds": watch.seconds, **environment()})
            _show(utility)
            print(f"backbone    {exported}")


def _show(utility: Metrics) -> None:
    accuracy, loss, epsilon = (utility.get(name) for name in ("accuracy", "final_train_loss", "epsilon"))
    known = isinstance(accuracy, float)
    print(f"accuracy    {accuracy:.1%}" if known else f"accuracy    none: {utility['accuracy_reason']}")
    if isinstance(loss, float):
        print(f"train loss  {loss:.4g}")
    if isinstance(epsilon, float):
        print(f"epsilon     {epsilon:.4g} at delta {utility['delta']:g}, {utility['neighbors']}")
