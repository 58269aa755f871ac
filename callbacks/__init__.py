"""Fragments of a LightningCLI config, installed as ``lightning_fedleak.recipes``."""
