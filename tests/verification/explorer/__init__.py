"""Every interleaving of a small federation: the move and all that may meet it, as a state machine that is seen whole.

Two tiers, two records of a group and a late third, a key that is replaced, a forget, a read, calls that land after
their deadline, a crash, an outage. The steps are those of `router`, in the same order; `recording` holds real runs
against them, step by step. `python -m tests.verification.explorer` explores all of it. The tests explore a part, and
break the steps one by one to see that it is noticed.
"""
