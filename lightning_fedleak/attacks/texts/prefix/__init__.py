"""Texts of causal models, read from left to right, each token verified after the ones before."""
