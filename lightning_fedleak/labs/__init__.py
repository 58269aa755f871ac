"""Research: the papers' baselines, and attacks of a dishonest server that are only simulated."""
