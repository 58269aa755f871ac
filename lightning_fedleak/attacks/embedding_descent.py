"""Now :mod:`~lightning_fedleak.attacks.texts.embedding_descent`; here for one release."""

from lightning_fedleak.attacks.texts.embedding_descent import INITIALS, EmbeddingDescent, Initial

__all__ = ["INITIALS", "EmbeddingDescent", "Initial"]
