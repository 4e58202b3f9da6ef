"""The recorder: what runs inside each rank of a watched job, and writes what the rank does.

It needs the standard library alone, whichever environment the job has.  `lightning_dsgd/why` says
what it writes, and reads it.
"""
