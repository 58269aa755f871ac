"""Scripts that print the figures the docs claim."""
