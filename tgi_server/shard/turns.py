"""Alternates steps and other work, such as vision towers, on the same device."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

# The duration of a usual step is the first quartile of the last ones: prompts, and programs that prepare images, make
# many steps in a row longer.
_RECENT_STEPS, _USUAL = 60, 0.25
# Target for the time between two tokens, in usual steps, unless the router has a target.
_GAP_STEPS = 2.0
# The share of this time that a step and a piece may fill: other things need time, too.
_FILLED = 0.9
# Minimum duration of a piece, in usual steps, so that other work progresses even if steps leave no time.
_LEAST_STEPS = 0.1
# Seconds of a piece while no step is computed. A new step waits for it.
_IDLE_PIECE_SECONDS = 0.05
# Seconds without a step after which the engine counts as idle.
_IDLE_SECONDS = 0.5


class Turns:
    """Lets one thread compute at a time: a step, then a piece of other work if any waits, then the next step."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._steps = 0  # number of steps that wait or are computed
        self._stepping = False
        self._pieces = 0  # number of pieces that wait
        self._piece = False
        self._piece_is_next = True
        self._recent = deque[float](maxlen=_RECENT_STEPS)
        self._stepped_at = -_IDLE_SECONDS

    @contextmanager
    def step(self) -> Iterator[None]:
        """Waits for the piece that is computed or has its turn, and blocks further pieces in the context."""
        with self._changed:
            self._steps += 1
            self._changed.wait_for(
                lambda: not (self._stepping or self._piece or (self._pieces and self._piece_is_next))
            )
            self._stepping = True
        began = time.perf_counter()
        try:
            yield
        finally:
            with self._changed:
                self._stepped_at = time.perf_counter()
                self._recent.append(self._stepped_at - began)
                self._steps -= 1
                self._stepping = False
                self._piece_is_next = True
                self._changed.notify_all()

    @property
    def steps_wait(self) -> bool:
        """Returns True while a step is computed, or waits."""
        return self._steps > 0

    @contextmanager
    def pieces(self) -> Iterator[None]:
        """Computes other work in the context; call `pause` between its pieces."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    def pause(self) -> None:
        """Lets a waiting step go first."""
        if self._steps:
            with self._changed:  # so that the piece waits before the step can end
                self._end()
                self._begin()

    def piece_seconds(self, target_gap_s: float | None) -> float:
        """Returns how many seconds the next piece may take.

        target_gap_s: target for the time between two tokens; None: two usual steps. The piece fills this time together
        with a step: the last one, or a usual one if that is longer.
        """
        with self._changed:
            if not self._steps and time.perf_counter() - self._stepped_at > _IDLE_SECONDS:
                return _IDLE_PIECE_SECONDS if target_gap_s is None else min(target_gap_s / 2, _IDLE_PIECE_SECONDS)
            if not self._recent:
                return _IDLE_PIECE_SECONDS
            usual, last = sorted(self._recent)[int(_USUAL * len(self._recent))], self._recent[-1]
        gap = _GAP_STEPS * usual if target_gap_s is None else target_gap_s
        return max(_FILLED * gap - max(usual, last), _LEAST_STEPS * usual)

    def _begin(self) -> None:
        with self._changed:
            self._pieces += 1
            self._changed.wait_for(
                lambda: not (self._piece or self._stepping) and (self._piece_is_next or not self._steps)
            )
            self._pieces -= 1
            self._piece = True
            self._piece_is_next = False

    def _end(self) -> None:
        with self._changed:
            self._piece = False
            self._changed.notify_all()
