"""Starts calls in the order in which the router numbered them: gRPC does not keep the order between methods."""

import asyncio


class OutOfTurn(Exception):
    """The call came after a ClearCache that was sent later: it must not run any more."""

    def __init__(self, sequence: int) -> None:
        super().__init__(f"call {sequence} was overtaken by a later ClearCache")


class CallOrder:
    """Whose turn it is. Calls numbered 0 are in no order; a call that never comes is passed over by `restart`."""

    def __init__(self) -> None:
        self._next = 1
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def turn(self, sequence: int) -> None:
        """Returns once all calls with lower numbers had their turn.

        The turn passes on by itself: what the caller does before it awaits something is done before later calls.
        Raises OutOfTurn when the number has been passed over.
        """
        if sequence == 0:
            return
        if sequence > self._next:
            waiting = self._waiting[sequence] = asyncio.get_running_loop().create_future()
            try:
                await waiting
            finally:
                self._waiting.pop(sequence, None)
        if sequence < self._next:
            raise OutOfTurn(sequence)
        self._pass_to(sequence + 1)

    def restart(self, sequence: int) -> None:
        """Passes over all numbers up to this one; those that wait are refused. 0 changes nothing."""
        if sequence == 0:
            return
        self._pass_to(sequence + 1)
        for number, waiting in self._waiting.items():
            if number <= sequence and not waiting.done():
                waiting.set_exception(OutOfTurn(number))

    def _pass_to(self, sequence: int) -> None:
        self._next = sequence
        waiting = self._waiting.get(sequence)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)
