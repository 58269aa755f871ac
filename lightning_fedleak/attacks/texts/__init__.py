"""What was said: texts from the hidden states at a split."""
