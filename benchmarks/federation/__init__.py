"""What a round of a federation leaks, and what watching it costs."""
