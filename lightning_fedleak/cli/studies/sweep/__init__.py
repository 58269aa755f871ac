"""A grid of defences, their strengths and attacks: what each costs and what it hides."""
