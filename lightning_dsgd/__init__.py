"""Decentralised data-parallel SGD for PyTorch Lightning; importing it registers the strategies.

```python
import lightning as L
import lightning_dsgd

L.Trainer(strategy="local_sgd", accelerator="cpu", devices=4).fit(model, datamodule)
```
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

# Its `--help` should not wait for torch and Lightning; it registers the strategies when it trains.
_IS_CONSOLE_SCRIPT = os.path.basename(sys.argv[0] if sys.argv else "") == "lightning-dsgd"

if TYPE_CHECKING or not _IS_CONSOLE_SCRIPT:
    from lightning_dsgd.algorithm import Algorithm
    from lightning_dsgd.callbacks import CommunicationMonitor, StragglerInjector
    from lightning_dsgd.strategy import (
        STRATEGIES,
        ADPSGDStrategy,
        AllReduceStrategy,
        DecentralizedStrategy,
        DPSGDStrategy,
        EagerSGDStrategy,
        GaussianTopkStrategy,
        GTopkStrategy,
        HPSGDStrategy,
        LocalSGDStrategy,
        NoSyncStrategy,
        OkTopkStrategy,
        PopSGDStrategy,
        SGPStrategy,
        TopkAllgatherStrategy,
        TopkDSAStrategy,
        WAGMAStrategy,
        register,
    )
    from lightning_dsgd.transport import PeerLost, Timeout, Transport, TransportError

    register()
else:

    def __getattr__(name: str) -> Any:
        """A public name, in the process of the console script."""
        if name in __all__:
            for home in ("strategy", "callbacks", "transport"):
                module = importlib.import_module(f"lightning_dsgd.{home}")
                if hasattr(module, name):
                    return getattr(module, name)
        raise AttributeError(f"module 'lightning_dsgd' has no attribute {name!r}")


__all__ = [
    "STRATEGIES",
    "ADPSGDStrategy",
    "Algorithm",
    "AllReduceStrategy",
    "CommunicationMonitor",
    "DPSGDStrategy",
    "DecentralizedStrategy",
    "EagerSGDStrategy",
    "GTopkStrategy",
    "GaussianTopkStrategy",
    "HPSGDStrategy",
    "LocalSGDStrategy",
    "NoSyncStrategy",
    "OkTopkStrategy",
    "PeerLost",
    "PopSGDStrategy",
    "SGPStrategy",
    "StragglerInjector",
    "Timeout",
    "TopkAllgatherStrategy",
    "TopkDSAStrategy",
    "Transport",
    "TransportError",
    "WAGMAStrategy",
]

__version__ = "0.1.0.dev0"
