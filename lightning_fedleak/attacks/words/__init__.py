"""Who was there: word types of a batch, from gradients."""
