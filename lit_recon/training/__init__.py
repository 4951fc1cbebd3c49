"""What every training shares: Trainer, base module, callbacks, progress and interruption."""
