"""Local differential privacy on the tokens of a batch, before the model sees them."""
