"""What is sent where only the largest entries are: thresholds and selection.

    kth_magnitude           th <- k-th largest |x_i|          reads x once, and 1.3 k candidates
    select                  values, indices <- |x_i| >= th    reads x once
                            with g: x += g, g <- 0 before     reads x and g, writes x and g

Legend: n elements of x, k of them wanted, th a threshold (a tensor of one element).

On a CPU a selection goes by pieces that stay in the cache, so what is written there as several
operations touches memory once (with g of another dtype than r, twice).  On a GPU nothing waits for
the device but `select` where the length of what it returns depends on the values.  `sparse_format`
has the wire format.

**Two forms on a GPU** give the same to the bit: Triton's kernels (`sparse_triton.py`), where Triton
can be imported, and operations of torch.  The faster one is taken, as measured there at the start.
Both are timed once for each device, dtype and size, on memory of its own in which one element in
100 is selected, from the call until a mark behind it has passed.  Sizes within a factor of two
count as one, and a size that was not measured takes the form of the nearest one that was: so no
step is held up.  A measurement takes a few milliseconds, and once the time that Triton needs to
compile its kernels.  Where these cannot run, a warning says why, and torch's form is taken.

The environment variable `LIGHTNING_DSGD_SELECTION` sets the form for every GPU of the process:
"triton" or "torch".  On a CPU there is one form and no choice.

**NaN and inf** are selected, whatever the threshold: who looks at what was selected has found them,
without a pass of its own.  **Zeros** are never selected, nor are subnormal numbers.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_dsgd import devices

_PIECE: Final = 1 << 17
"""The number of elements that stay in a core's cache from one operation to the next."""
_THREADS_WORTH: Final = 1 << 20
"""Fewer elements are not worth another thread."""
_SAMPLE_STRIDE: Final = 61
_SAMPLE_FROM: Final = 1 << 16
"""A tensor of fewer elements is not worth a sample."""
_BITS: Final = {
    2: (torch.int16, np.uint16),
    4: (torch.int32, np.uint32),
    8: (torch.int64, np.uint64),
}
VARIABLE: Final = "LIGHTNING_DSGD_SELECTION"
_TRIAL_STRIDE: Final = 100
_REPEATS: Final = 3
_LIMIT_S: Final = 60.0
_ALWAYS: Final = "torch"
"""The form that runs wherever torch does."""
_log: Final = logging.getLogger("lightning_dsgd")

Form = Callable[..., tuple[Tensor, Tensor]]
"""Adds a tensor to x, and returns x's values and indices that reach a least magnitude."""


# ---- thresholds ----


def kth_magnitude(x: Tensor, k: int) -> Tensor:
    """Returns exactly the k-th largest |x_i|; 0 where k is larger than the number of elements.

    A sample gives a threshold that a little more than k elements reach, and only these are ranked.
    All elements are ranked where the sample has misled.
    """
    n = len(x)
    if k > n:
        return x.new_zeros(())
    if n >= _SAMPLE_FROM and 4 * k <= n:
        sample = x[::_SAMPLE_STRIDE]
        expected = k // _SAMPLE_STRIDE
        guess = kth_magnitude(sample, expected + 4 * int(expected**0.5) + 4)
        candidates, _ = select(x, guess)
        if len(candidates) >= k:
            x = candidates
    return x.abs().topk(k, sorted=False).values.min()


def is_near(count: int, k: int) -> bool:
    """Returns whether a threshold that selects `count` entries may stay: 3k/4 to 5k/4."""
    return 3 * k <= 4 * count <= 5 * k


def corrected(threshold: Tensor, count: int, k: int) -> Tensor:
    """Moves the threshold gently towards one that would select k entries.

    By the tenth root of the error: the tail of what accumulates is steep, as all that lay above the
    threshold before is gone, and a threshold that is moved too far lets through too many and too
    few in turn.
    """
    return threshold.mul((count / k) ** 0.1) if count else threshold


# ---- selection ----


def select(
    x: Tensor, threshold: Tensor, g: Tensor | None = None, most: int | None = None
) -> tuple[Tensor, Tensor]:
    """Returns values and ascending indices of the elements that reach the threshold's magnitude.

    Adds g to x before, and zeroes g.  With `most`, selects no more than so many, the first ones,
    and waits for no device: there both tensors returned are as long, or as long as x, and behind
    the elements that were selected the indices are the length of x.
    """
    least = threshold.clamp(min=torch.finfo(x.dtype).smallest_normal)  # no zeros
    if devices.is_on_host(x):
        values, indices = select_by_pieces(x, least, g)
        return values[:most], indices[:most]
    return _choice.among(forms(x), x)(x, least, g, most)


def prepare(x: Tensor, num_regions: int, *, is_told: bool) -> None:
    """Chooses the form of selection from tensors like x and from its regions, so no step has to.

    Args:
        x: a tensor like the one to select from
        num_regions: the number of regions into which the tensor is divided
        is_told: whether the measured times are logged
    """
    if not devices.is_on_host(x):
        for part in (x, x[: -(-len(x) // num_regions)]):
            _choice.prepare(forms(x), part, is_told=is_told)


def forms(x: Tensor) -> dict[str, Form]:
    """Returns the ways to select from a tensor on a device; all give the same to the bit."""
    forms: dict[str, Form] = {"torch": select_plainly}
    if devices.runs_triton(x):
        from lightning_dsgd.primitives import sparse_triton

        forms["triton"] = sparse_triton.select
    return forms


def select_plainly(
    x: Tensor, least: Tensor, g: Tensor | None = None, most: int | None = None
) -> tuple[Tensor, Tensor]:
    """Selects on any device; the two faster forms must equal its result to the bit."""
    if g is not None:
        x += g
        g.zero_()
    # Not `>=`, which would pass over NaN.
    marks = (x.abs() < least).logical_not_()
    if most is None:
        indices = marks.nonzero().squeeze(1)
        return x.index_select(0, indices), indices
    size = min(most, len(x))
    indices = torch.nonzero_static(marks, size=size, fill_value=len(x)).squeeze(1)
    return x[indices.clamp(max=len(x) - 1)], indices


def select_by_pieces(x: Tensor, least: Tensor, g: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Selects on a CPU, piece by piece.

    By NumPy, which is faster than torch at comparing into marks and at finding the few among many.
    Magnitudes, NaN's too, are ordered like the integers that their bits are without the sign.
    """
    if g is not None and not (g.dtype == x.dtype in (torch.float32, torch.float64)):
        x += g
        g.zero_()
        g = None
    signed, unsigned = _BITS[x.itemsize]
    all_bits = x.detach().view(signed).numpy()
    to_add = None if g is None else (x.detach().numpy(), g.detach().numpy())
    twice_least = 2 * int(least.view(signed))

    def select_between(begin: int, end: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        selected = []
        doubled = np.empty(min(_PIECE, end - begin), unsigned)
        marks = np.empty(len(doubled), np.bool_)
        for start in range(begin, end, _PIECE):
            stop = min(start + _PIECE, end)
            if to_add is not None:
                total, gradient = (array[start:stop] for array in to_add)
                total += gradient
                gradient[:] = 0
            bits, num = all_bits[start:stop], stop - start
            np.left_shift(bits.view(unsigned), 1, out=doubled[:num])
            np.greater_equal(doubled[:num], twice_least, out=marks[:num])
            (indices,) = marks[:num].nonzero()
            values = bits.take(indices)
            indices += start
            selected.append((values, indices))
        return selected

    num_threads = max(1, min(torch.get_num_threads(), len(x) // _THREADS_WORTH))
    ends = [len(x) * i // num_threads for i in range(num_threads + 1)]
    selected = [(all_bits[:0], np.empty(0, np.intp))]
    if num_threads == 1:
        selected += select_between(*ends)
    else:
        with ThreadPoolExecutor(num_threads, "dsgd-select") as threads:
            for part in threads.map(select_between, ends, ends[1:]):
                selected += part
    values, indices = map(np.concatenate, zip(*selected, strict=True))
    return torch.from_numpy(values).view(x.dtype), torch.from_numpy(indices)


def largest(values: Tensor, k: int) -> Tensor:
    """Marks the k largest magnitudes; of equal magnitudes, the first are taken."""
    magnitudes = values.abs()
    least = kth_magnitude(values, k)
    marks, ties = magnitudes > least, magnitudes == least
    # Counted on the device: the host, which could take a slice of so many, would wait for it.
    return marks.logical_or_(ties.logical_and_(ties.cumsum(0) <= k - marks.sum()))


def places(marks: Tensor, count: int) -> Tensor:
    """Returns the ascending places of so many marks; unlike `nonzero`, waits for no device."""
    if devices.is_on_host(marks):
        return marks.nonzero().squeeze(1)
    return torch.nonzero_static(marks, size=count).squeeze(1)


def count_each(digits: Tensor, num: int) -> Tensor:
    """Counts each of so many digits; unlike `bincount`, waits for no device."""
    if devices.is_on_host(digits):
        return torch.bincount(digits, minlength=num)
    counts = torch.zeros(num, dtype=torch.int64, device=digits.device)
    return counts.index_add_(0, digits.to(torch.int64), torch.ones_like(digits, dtype=torch.int64))


# ---- the faster form ----


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
        port = devices.port_of(x.device)
        trial = torch.full((len(x),), 0.5, dtype=x.dtype, device=x.device)
        trial[::_TRIAL_STRIDE] = 1.0
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


def _finish(port: devices.Port) -> None:
    """Waits until all that this thread has queued on the device is done."""
    if not devices.until(port.mark().has_passed, _LIMIT_S, lambda: None):
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


_choice: Final = FasterForm()
"""The measured choices of this process, which has the devices."""
