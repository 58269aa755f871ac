"""How results are scored, and which questions are asked."""
