"""The face that the Trainer of Lightning sees: strategies and checkpoints.

Lightning is loaded before any module here: once it is, `named` is (see `arrival`), and that needs
whole modules.
"""

import lightning.pytorch  # noqa: F401
