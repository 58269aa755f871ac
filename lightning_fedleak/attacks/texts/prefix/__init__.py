"""Texts of causal models, read from left to right, each token verified behind the ones before."""
