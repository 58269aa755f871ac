"""The computations of the commands, for use in your own programs without the command line."""
