"""Local differential privacy on the tokens of a batch, before the model sees them."""

from lightning_fedleak.defenses.token_ldp.token_ldp import LDPProtocol as LDPProtocol
from lightning_fedleak.defenses.token_ldp.token_ldp import TokenLDP as TokenLDP
from lightning_fedleak.defenses.token_ldp.words import BatchForm as BatchForm
