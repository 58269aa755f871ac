"""Local differential privacy on the words of a text."""

from lightning_fedleak.defenses.token_ldp.token_ldp import TokenLDP

__all__ = ["TokenLDP"]
