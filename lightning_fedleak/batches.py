"""What the client knows of a batch: token ids, labels, masks."""
