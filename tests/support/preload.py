"""What the processes of the tests are forked from: all that they need is loaded."""

import gc
import importlib

import pytest  # noqa: F401
import torch  # noqa: F401

import tests.support.worlds  # noqa: F401

importlib.import_module("lightning_dsgd.pytorch_lightning")  # loads both of Lightning's packages

# A garbage collection in a process would touch, and so copy, every page that it shares: 0.3 s.
gc.collect()
gc.freeze()
