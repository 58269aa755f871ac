"""Attacks that infer whether a text is in the batch: with crafted layers, or passively."""
