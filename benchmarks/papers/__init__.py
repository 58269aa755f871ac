"""What can be proven about the attention adversary: Lemma 2 of Vu et al. 2024."""

from benchmarks.papers.lemma import (
    Estimate,
    advantage_bound,
    condition,
    direction_probability,
    projection_radius,
    retrieval_error,
    separation,
    smallest_beta,
)
from benchmarks.papers.synthetic import (
    Law,
    SimulatedBound,
    box_probability,
    projection_probability,
    simulate_bound,
)

__all__ = [
    "Estimate",
    "Law",
    "SimulatedBound",
    "advantage_bound",
    "box_probability",
    "condition",
    "direction_probability",
    "projection_probability",
    "projection_radius",
    "retrieval_error",
    "separation",
    "simulate_bound",
    "smallest_beta",
]
