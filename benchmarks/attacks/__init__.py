"""What attacks recover."""
