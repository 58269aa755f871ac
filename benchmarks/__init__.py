"""Scripts that print the figures the docs claim.

They are run as modules from the folder of the checkout: ``python -m benchmarks.cost.overhead``.
"""
