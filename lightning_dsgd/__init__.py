"""Data-parallel training that waits less for late ranks; importing it registers the strategies.

```python
import lightning as L
import lightning_dsgd

L.Trainer(strategy="balanced", accelerator="cpu", devices=4).fit(model, datamodule)
```

The import itself loads neither torch nor Lightning: a public name loads what it needs when it is
asked for, and the strategies are registered as soon as Lightning is there.
"""

import importlib
import traceback
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from lightning_dsgd import wings
from lightning_dsgd.arrival import when_imported
from lightning_dsgd.hyperparameters import NAMES_ALIKE

__version__ = "0.1.0"

_HOMES = {
    "Algorithm": "algorithm",
    "BalancedStrategy": "trainer.balanced",
    "BatchSizesSampler": "data.unequal",
    "CheckpointArtifacts": "lab.callbacks",
    "CommunicationMonitor": "lab.callbacks",
    "DecentralizedStrategy": "trainer.strategy",
    "Diverged": "transport",
    "FabricStrategy": "fabric.strategy",
    "LoopTrace": "lab.timeline.loop_trace",
    "OfflineWandbLogger": "lab.trackers",
    "PeerLost": "transport",
    "ShardedStrategy": "sharded.strategy",
    "StepTrace": "lab.timeline.step_trace",
    "StragglerInjector": "lab.callbacks",
    "Timeout": "transport",
    "Transport": "transport",
    "TransportError": "transport",
    "decentralized": "plain.training",
}
"""Where each public name is defined, but for the algorithms."""

if TYPE_CHECKING:  # "as": `mypy --strict` takes a name only where it is exported by name
    from lightning_dsgd.algorithm import Algorithm as Algorithm
    from lightning_dsgd.algorithms import *  # noqa: F403
    from lightning_dsgd.data.unequal import BatchSizesSampler as BatchSizesSampler
    from lightning_dsgd.fabric.strategy import FabricStrategy as FabricStrategy
    from lightning_dsgd.lab.callbacks import CheckpointArtifacts as CheckpointArtifacts
    from lightning_dsgd.lab.callbacks import CommunicationMonitor as CommunicationMonitor
    from lightning_dsgd.lab.callbacks import StragglerInjector as StragglerInjector
    from lightning_dsgd.lab.timeline.loop_trace import LoopTrace as LoopTrace
    from lightning_dsgd.lab.timeline.step_trace import StepTrace as StepTrace
    from lightning_dsgd.lab.trackers import OfflineWandbLogger as OfflineWandbLogger
    from lightning_dsgd.plain.training import decentralized as decentralized
    from lightning_dsgd.sharded.strategy import ShardedStrategy as ShardedStrategy
    from lightning_dsgd.trainer.balanced import BalancedStrategy as BalancedStrategy
    from lightning_dsgd.trainer.strategy import DecentralizedStrategy as DecentralizedStrategy
    from lightning_dsgd.transport import Diverged as Diverged
    from lightning_dsgd.transport import PeerLost as PeerLost
    from lightning_dsgd.transport import Timeout as Timeout
    from lightning_dsgd.transport import Transport as Transport
    from lightning_dsgd.transport import TransportError as TransportError


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return [*_HOMES, *_algorithms()]
    if name not in _HOMES and (name[:1] == "_" or name[:1].islower()):
        raise AttributeError(f"module 'lightning_dsgd' has no attribute {name!r}")
    if name in _HOMES:
        value = getattr(wings.load(_HOMES[name], f"lightning_dsgd.{name}"), name)
    elif name in (algorithms := _algorithms()):
        value = algorithms[name]
    else:
        raise _unknown(name)
    globals()[name] = value
    return value


def _unknown(name: str) -> Exception:
    """Returns the error about a name that nothing public has, with the name that may be meant."""
    known = {each.lower(): each for each in [*_HOMES, *_algorithms()]}
    near = [known[low] for low in get_close_matches(name.lower(), known, 1, NAMES_ALIKE)]
    meant = f"; did you mean {near[0]}?" if near else ""
    text = f"module 'lightning_dsgd' has no attribute {name!r}{meant}"
    # `from lightning_dsgd import NAME` drops the text of an AttributeError.  It asks twice whether
    # there is the name, the first time from this function of Python's.
    callers = [frame.f_code.co_name for frame, _ in traceback.walk_stack(None)]
    if near and "_handle_fromlist" in callers[:3]:
        return ImportError(text)
    return AttributeError(text)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_algorithms()})


def _algorithms() -> dict[str, Any]:
    """By the name of the class."""
    registry: Any = importlib.import_module("lightning_dsgd.algorithms")
    return {kind.__name__: kind for kind in registry.ALL_ALGORITHMS.values()}


when_imported("lightning.pytorch", "lightning_dsgd.trainer.named")
when_imported("pytorch_lightning", "lightning_dsgd.pytorch_lightning")
when_imported("lightning.fabric", "lightning_dsgd.fabric.strategy")
when_imported("lightning_fabric", "lightning_dsgd.fabric.twin")
