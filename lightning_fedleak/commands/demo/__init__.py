"""The command ``fedleak demo``: two fine-tuning runs, one watched, one with a gate."""
