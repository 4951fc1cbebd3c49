"""All readers that are fuzzed, by name, the quickest first."""

from __future__ import annotations

from tests.fuzzing import data_files, run_files, search_files, settings_files, tensor_files, torch_files
from tests.fuzzing.harness import Reader

READERS: dict[str, Reader] = {
    reader.name: reader
    for reader in (
        data_files.NPZ,
        tensor_files.TENSORS,
        tensor_files.BACKBONE,
        tensor_files.GENERATOR,
        tensor_files.UPDATE,
        tensor_files.RELEASED,
        tensor_files.FINISHED,
        search_files.SEARCH,
        search_files.ROUNDS,
        tensor_files.OUTCOME,
        torch_files.STATE_DICT,
        torch_files.TRAINING,
        settings_files.SETTINGS,
        data_files.IMAGE_FOLDER,
        data_files.MNIST_FILES,
        data_files.CIFAR_FILES,
        run_files.EVALUATION,
        torch_files.RUNNING,
        torch_files.EXPORTED,
        run_files.RUN,
        settings_files.OVERRIDES,
        settings_files.CONFIGURATION,
    )
}
