"""What the commands compute, for programs of your own: no command line is needed."""
