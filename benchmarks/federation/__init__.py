"""What a round of a federation gives away, and what watching it costs."""
