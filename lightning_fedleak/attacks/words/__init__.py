"""Attacks on words: the word types of a batch, from gradients."""
