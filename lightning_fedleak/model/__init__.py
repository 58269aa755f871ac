"""What is observed of a model, and how it is run without a trace."""
