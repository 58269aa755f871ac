"""Recovery of causal models' texts from left to right, with each token verified in turn."""
