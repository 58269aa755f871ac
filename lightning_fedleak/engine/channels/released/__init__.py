"""Attacks on the trained weights: the texts of their queries, their looks and their records."""
