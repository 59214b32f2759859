"""Real processes, killed at random moments: a router and its stores under load, and what must be true afterwards.

    python -m tests.verification.kill --rounds 200

A round is one federation in a folder of its own, with clients at its door. At random moments one or several of its
processes are killed, or stopped for a while as one that hangs; a router that has gone is started again. When the
clients are done the federation is left to settle, and everything is read back: through the router, and from the stores'
files. What was acknowledged must be there as it was written, what was forgotten must be gone, nothing may be there
twice, what was written together must be there together, and no process may be left behind.
"""
