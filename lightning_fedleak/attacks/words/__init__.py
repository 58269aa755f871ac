"""Attacks on words: they recover the word types (distinct token ids) of a batch from gradients."""
