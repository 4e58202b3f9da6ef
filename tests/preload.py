"""What the processes of the tests are forked from: all that they need is loaded."""

import gc

import pytest  # noqa: F401
import torch  # noqa: F401

import lightning_dsgd  # noqa: F401
import tests.worlds  # noqa: F401

# A garbage collection in a process would touch, and so copy, every page that it shares: 0.3 s.
gc.collect()
gc.freeze()
