"""Long random runs of a whole federation, on a clock that jumps.

    python -m tests.verification.simulation --seeds 10000

A seed is a life of some simulated days: which servers are behind the tiers, what clients do, which calls go wrong and
how, when tiers and routers die. Everything that happens follows from it, so that a seed that finds something finds the
same again, to the byte. What must be true is tests/support/model.py's to say.
"""
