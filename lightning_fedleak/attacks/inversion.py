"""Now :mod:`~lightning_fedleak.attacks.texts.base`; here for one release."""

from lightning_fedleak.attacks.texts.base import NOTHING, InversionAttack, TextAttack, TextGuess

__all__ = ["NOTHING", "InversionAttack", "TextAttack", "TextGuess"]
