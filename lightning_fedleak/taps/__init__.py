"""The taps that take snapshots of a training step."""
