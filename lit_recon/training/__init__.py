"""Training with Lightning: Trainer, base module, callbacks, progress and interruption."""
