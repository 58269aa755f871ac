"""A causal model's texts, left to right, each token verified behind what is known."""
