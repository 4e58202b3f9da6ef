"""What each Python process of a watched job runs before its program.

`lightning-dsgd why` puts the folder of this file in front of PYTHONPATH; Python's `site` then
imports it.  The file starts the recorder where the process is a rank, and loads the `sitecustomize`
that the process would have had without it.  Nothing here may end, or change, the user's program.
"""

import contextlib
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def _load_the_users() -> None:
    """Loads the next `sitecustomize` of the path, if there is one; its errors are the user's."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [folder for folder in sys.path if os.path.abspath(folder) != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    sys.modules["sitecustomize"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


with contextlib.suppress(Exception):
    from lightning_dsgd_rank import entering

    entering.enter()
_load_the_users()
