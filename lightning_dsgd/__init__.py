"""Decentralised data-parallel SGD for PyTorch Lightning; importing it registers the strategies.

```python
import lightning as L
import lightning_dsgd

L.Trainer(strategy="local_sgd", accelerator="cpu", devices=4).fit(model, datamodule)
```
"""

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

register()
