"""Turns of steps and of other work, such as vision towers, on the same device."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

# A usual step takes as long as a quarter of these last ones at most: prompts, and programs that prepare images, make
# many steps in a row longer.
_RECENT_STEPS, _USUAL = 60, 0.25
# The gap between two tokens that the pieces of other work leave, in usual steps, unless the router has a target.
_GAP_STEPS = 2.0
# The part of a gap that a step and a piece may fill: there is more between two tokens than these.
_FILLED = 0.9
# The least that a piece takes, in usual steps, so that other work progresses beside steps that leave no room.
_LEAST_STEPS = 0.1
# Seconds of a piece while no step is computed. A step that comes waits for it.
_IDLE_PIECE_SECONDS = 0.05
# Steps that are further apart do not follow each other.
_IDLE_SECONDS = 0.5


class Turns:
    """Lets one thread compute at a time: a step, then a piece of other work if any waits, then the next step."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._steps = 0  # that wait, or are computed
        self._stepping = False
        self._pieces = 0  # that wait
        self._piece = False
        self._piece_is_next = True
        self._recent = deque[float](maxlen=_RECENT_STEPS)
        self._stepped_at = -_IDLE_SECONDS

    @contextmanager
    def step(self) -> Iterator[None]:
        """Waits for the piece that is computed, or whose turn it is, and keeps further pieces from beginning."""
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
        """Lets a step that waits go first."""
        if self._steps:
            with self._changed:  # so that the piece waits before the step can end
                self._end()
                self._begin()

    def piece_seconds(self, target_gap_s: float | None) -> float:
        """Returns how long the next piece may take. target_gap_s: between two tokens; None: two usual steps.

        With the last step, or a usual one if that is longer, it fills the gap.
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
