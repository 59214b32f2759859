"""Generated messages against the codec and both doors: no crash, no hang, only JSON-RPC comes out, memory stays flat.

    python -m tests.verification.fuzz [--messages 200000] [--seed N] [--only codec|stdio|http] [--findings FILE]

Of the messages 60 % go to the codec in this process, 30 % to an a2m-router on pipes and 10 % to one on HTTP, each
router with four a2m-stores behind it in a folder of its own. What is sent follows from the seed and the door alone.

- What a message is owed is told without the router's codec: one answer with its id to the byte, one whose id may be
  null where it is malformed, nothing for a notification.
- A finding goes to a file, with the seed and the bytes of every message that may have caused it; the exit code is 1.
- Every CANARY messages what was sent must have been answered, a record must still be written, found and fetched, and
  everything is forgotten, so that no growth can be put down to what is stored.
"""
