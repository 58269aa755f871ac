"""See, while a language model is fine-tuned, what leaves a federated client."""
