"""``fedleak demo``."""
