"""Attacks that recover whole texts, from hidden states at a split or from gradients."""
