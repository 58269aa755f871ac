"""Defences of the hidden states at a split layer."""
