"""Research: baselines of papers, and attacks and mechanisms that are only simulated."""
