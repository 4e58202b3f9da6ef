"""Which form of selection runs on a device: the faster one, as measured there at the start.

On a GPU there are two forms that give the same to the bit: Triton's kernels and operations of
torch.  Both are timed once for each device, dtype and size, on memory of its own in which one
element in 100 is selected, from the call until a mark behind it has passed.  Sizes within a factor
of two count as one, and a size that was not measured takes the form of the nearest one that was: so
no step is held up.  A measurement takes a few milliseconds, and once the time that Triton needs to
compile its kernels.  Where these cannot run, a warning says why, and torch's form is taken.

The environment variable `LIGHTNING_DSGD_SELECTION` sets the form for every GPU of the process:
"triton" or "torch".  On a CPU there is one form and no choice.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from lightning_dsgd.devices import Port, port_of, until

VARIABLE: Final = "LIGHTNING_DSGD_SELECTION"
_STRIDE: Final = 100
_REPEATS: Final = 3
_LIMIT_S: Final = 60.0
_ALWAYS: Final = "torch"
"""The form that runs wherever torch does."""
_log: Final = logging.getLogger("lightning_dsgd")

Form = Callable[..., tuple[Tensor, Tensor]]
"""Adds a tensor to x, and returns x's values and indices that reach a least magnitude."""


class FasterForm:
    """Remembers what was measured; any thread may ask.

    Args:
        clock: tells the time in seconds
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._taken: dict[tuple[torch.device, torch.dtype], dict[int, str]] = {}

    def prepare(self, forms: Mapping[str, Form], x: Tensor, *, is_told: bool = False) -> None:
        """Measures the forms for tensors like x, if that was not done before.

        Args:
            forms: the forms by name; a single one is taken unmeasured
            x: a tensor on a device
            is_told: whether the measurement is logged
        """
        if _given(forms, x) is None:
            with self._lock:
                if _size(x) not in self._known(x):
                    self._measure(forms, x, is_told=is_told)

    def among(self, forms: Mapping[str, Form], x: Tensor) -> Form:
        """Returns the form for tensors like x, measured for the nearest size, or else now."""
        given = _given(forms, x)
        if given is not None:
            return forms[given]
        with self._lock:
            if not self._known(x):
                self._measure(forms, x, is_told=False)
            known = self._known(x)
            nearest = min(known, key=lambda size: abs(size - _size(x)))
            return forms[known[nearest]]

    def _known(self, x: Tensor) -> dict[int, str]:
        """Returns the form that was taken for each size."""
        return self._taken.setdefault((x.device, x.dtype), {})

    def _measure(self, forms: Mapping[str, Form], x: Tensor, *, is_told: bool) -> None:
        times = self._times(forms, x)
        taken = min(times, key=lambda name: times[name])
        self._known(x)[_size(x)] = taken
        if is_told:
            found = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in times.items())
            _log.info(
                f"Selection from {len(x):,} elements on {x.device}: {found}; {taken} is taken "
                f"({VARIABLE} sets it)."
            )

    def _times(self, forms: Mapping[str, Form], x: Tensor) -> dict[str, float]:
        """Measures all forms that run here; kernels may not compile, as without a C compiler."""
        times: dict[str, float] = {}
        for name, form in forms.items():
            try:
                times[name] = self._seconds(form, x)
            except Exception as error:
                if name == _ALWAYS:
                    raise
                warnings.warn(
                    f"selection by {name} cannot run on {x.device}, {type(error).__name__}: "
                    f"{error}; {_ALWAYS} is taken ({VARIABLE}={_ALWAYS} does not try)",
                    stacklevel=2,
                )
        return times

    def _seconds(self, form: Form, x: Tensor) -> float:
        """Returns the least of some times, without the first, in which kernels are compiled."""
        port = port_of(x.device)
        trial = torch.full((len(x),), 0.5, dtype=x.dtype, device=x.device)
        trial[::_STRIDE] = 1.0
        zeros, least = torch.zeros_like(trial), trial.new_full((), 0.75)
        times = []
        for _ in range(1 + _REPEATS):
            _finish(port)
            begin = self._clock()
            form(trial, least, zeros)
            _finish(port)
            times.append(self._clock() - begin)
        return min(times[1:])


def _size(x: Tensor) -> int:
    """Returns a number that is the same for all lengths between two powers of two."""
    return len(x).bit_length()


def _finish(port: Port) -> None:
    """Waits until all that this thread has queued on the device is done."""
    if not until(port.mark().has_passed, _LIMIT_S, lambda: None):
        raise TimeoutError(
            f"what is queued on {port.device} must be done within {_LIMIT_S:g} s, it was not; look "
            "for what else runs on the device"
        )


def _given(forms: Mapping[str, Form], x: Tensor) -> str | None:
    """Returns the form that needs no measurement: the only one, or the environment variable's."""
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return next(iter(forms)) if len(forms) == 1 else None
    if wanted in forms:
        return wanted
    if wanted == "triton":
        raise ValueError(
            f"{VARIABLE}=triton needs Triton and a GPU that it compiles for, got tensors on "
            f"{x.device}; pip install triton, or unset {VARIABLE}"
        )
    raise ValueError(f'{VARIABLE} must be "triton" or "torch", got {wanted!r}; or unset it')
