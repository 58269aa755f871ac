"""Attacks on the trained weights: what they are asked about, and when, and what is recorded."""
