"""A federation in one command: what each client's update and their sum give away."""
