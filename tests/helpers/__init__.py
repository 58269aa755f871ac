"""Tiny models and modules that several tests use."""
