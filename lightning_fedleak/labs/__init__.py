"""Research code: the baselines of papers, and simulated attacks of a dishonest server."""
