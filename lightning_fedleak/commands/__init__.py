"""The subcommands of ``fedleak``."""
