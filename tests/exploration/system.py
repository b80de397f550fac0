"""The transition system of a world, without the orders of steps that lead to the same states.

The rules below leave such orders out (`World.reduces`). Each rule says why it loses nothing, and a
test compares small worlds with and without the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.exploration import calls, driver, exchange, slot
from tests.exploration.servers import Log
from tests.exploration.state import DOWN, GONE, SlotState, State, Step
from tests.exploration.transitions import BROKEN, Transitions
from tests.exploration.worlds import World
from tests.simulation.variant import Variant

from onceflow.core.protocol import messages
from onceflow.core.protocol.checkpoints.decisions import Barrier
from onceflow.core.protocol.loops import attempt_facts


class System(Transitions):
    """The steps of one world under one variant."""

    def __init__(self, world: World, variant: Variant) -> None:
        super().__init__(world, variant)
        self._can_ask_of: dict[tuple[SlotState, ...], bool] = {}

    def steps(self, state: State) -> Sequence[Step]:
        """Return the steps that `state` allows, or some that may be taken before all others."""
        if self.world.reduces and (first := self._first_steps(state)) is not None:
            return first
        return self.all_steps(state)

    def _first_steps(self, state: State) -> Sequence[Step] | None:
        """Return steps that may be taken before all others, or None."""
        left = self._list_left_behind(state)
        if (leave := self._leave(state, left)) is not None:
            return (leave,)
        for index, slot_state in enumerate(state.slots):
            if slot_state.process == GONE:
                continue
            if (deliver := self._independent_delivery(state, index)) is not None:
                return (deliver,)
            if emits := self._first_emission(state, index):
                return emits
            if slot_state.inbox and (received := self._first_receive(state, index)) is not None:
                return received
        for index, slot_state in enumerate(state.slots):
            if slot_state.outbox and (step := self._quiet_hear(state, index)) is not None:
                return (step,)
        if inner := self._inner_steps_of(state, left):
            return inner
        for number, its in enumerate(state.drivers):
            if its.process != DOWN and self._has_all_messages(state, number):
                return self._driver_steps(state, number)
        if len(state.drivers) == 1 and state.drivers[0].process != DOWN:
            lists = self._private_list(state)
            if lists is not None:
                return lists
        return self._calm_request(state)

    # --- slots that nobody hears -----------------------------------------------------------------

    def _is_left_behind(self, state: State, slot_state: SlotState) -> bool:
        """Return True if no driver hears the slot any more, and it has been told to leave.

        Its driver is dead, or has ended the attempt. So what the slot does is seen in targets only.
        """
        if not self.variant.slot_checks_attempt:
            return False
        if slot_state.driver < 0:
            return True
        value = self.look(state.drivers[slot_state.driver].process).value
        return bool(value.attempt > slot_state.attempt or value.phase != "attempt")

    def _deaths(self, state: State, index: int) -> list[Step]:
        """Return the death of a slot, unless it is left behind.

        Such a slot may as well stand still, which costs no fault.
        """
        if self.world.reduces and self._is_left_behind(state, state.slots[index]):
            return []
        return super()._deaths(state, index)

    def _list_left_behind(self, state: State) -> list[list[int]]:
        """Return the slots of each attempt that is left behind, if none waits for a target."""
        found: dict[int, list[int]] = {}
        for index, slot_state in enumerate(state.slots):
            if slot_state.process != GONE and self._is_left_behind(state, slot_state):
                found.setdefault(slot_state.attempt, []).append(index)
        return [
            indices
            for indices in found.values()
            if not any(self.look(state.slots[index].process).requests for index in indices)
        ]

    def _leave(self, state: State, left: Sequence[Sequence[int]]) -> Step | None:
        """Return the step in which all slots of an attempt that is left behind leave, or None.

        No step of these slots leads to a request any more. So their steps can be seen only by these
        slots, and any of their orders will do.
        """
        for indices in left:
            slots = tuple(state.slots[i]._replace(driver=-1, outbox=()) for i in indices)
            if any(s.inbox for s in slots) and not self._can_ask(slots):
                attempt = slots[0].attempt
                text = f"the slots of attempt {attempt} receive what is left, and leave"
                return Step(text, lambda a=attempt: self._receive_all(state, a))  # type: ignore[misc]
        return None

    def _receive_all(self, state: State, attempt: int) -> State:
        while waiting := [
            index
            for index, slot_state in enumerate(state.slots)
            if slot_state.attempt == attempt and slot_state.inbox
        ]:
            state = self._receive(state, waiting[0]).move()
        return state

    def _inner_steps_of(self, state: State, left: Sequence[Sequence[int]]) -> Sequence[Step]:
        """Return the steps of the slots of one attempt that is left behind.

        No other process changes what they may do, and they change no other process.
        """
        for indices in left:
            if steps := [step for index in indices for step in self._inner_steps(state, index)]:
                return steps
        return ()

    def _can_ask(self, slots: tuple[SlotState, ...]) -> bool:
        """Return True if one of `slots` can come to a request by steps of `slots` alone."""
        known = self._can_ask_of.get(slots)
        if known is None:
            seen, waiting = {slots}, [slots]
            known = False
            while waiting and not known:
                state = State((), waiting.pop(), -1, (), 0)
                for after in self._follow(state):
                    known = known or after is None or self._has_request(after)
                    if after is not None and after not in seen:
                        seen.add(after)
                        waiting.append(after)
            self._can_ask_of[slots] = known
        return known

    def _follow(self, state: State) -> Iterator[tuple[SlotState, ...] | None]:
        """Yield the slots after each inner step; None after a step that breaks a law."""
        for index in range(len(state.slots)):
            for step in self._inner_steps(state, index):
                try:
                    yield step.move().slots
                except BROKEN:
                    yield None

    def _has_request(self, slots: Sequence[SlotState]) -> bool:
        return any(s.process != GONE and self.look(s.process).requests for s in slots)

    # --- slots -----------------------------------------------------------------------------------

    def _independent_delivery(self, state: State, index: int) -> Step | None:
        """Return the step in which a sink gets an element, if it depends on no other step.

        Without overtaking, a row or an end of input is such an element. Its place among those of
        other channels changes nothing: a barrier waits for the rows before it in each channel, and
        holds back the rows behind it. A later arrival would look as if the sender had been slower.

        With overtaking, any element only arrives in this step, and is processed in another one.
        """
        slot_state = state.slots[index]
        if not self.look(slot_state.process).value.is_working:
            return None
        for channel, elements in enumerate(slot_state.channels):
            if elements and (
                self.world.overtakes or not isinstance(self.codes.value(elements[0]), Barrier)
            ):
                return self._deliver(state, index, channel)
        return None

    def _first_emission(self, state: State, index: int) -> Sequence[Step]:
        """Return the next step of a source that no barrier can reach before its end.

        If no checkpoint is requested any more, the first barrier follows the end of all sources. So
        the only step that excludes the source's next one is the death of the slot, or its leaving.
        If it leaves instead, no barrier follows, and the rows that it would have sent are never
        seen.
        """
        value = self.look(state.slots[index].process).value
        asks = self.world.savepoint or self.world.checkpoints
        if asks and not (self.world.asks_once and 0 < state.asked_in < state.slots[index].attempt):
            return ()
        if not value.is_working or value.has_reported_end:
            return ()
        for choice in self.look(state.slots[index].process).choices:
            if isinstance(self.codes.value(choice), (exchange.EmitRow, slot.EndInput)):
                return (self._choose(state, index, choice), *self._deaths(state, index))
        return ()

    def _first_receive(self, state: State, index: int) -> Sequence[Step] | None:
        """Return the steps of a slot that receives a message before all other steps, or None.

        A slot without an exchange that waits for no target: each of its steps changes only the slot
        itself, takes the first message of its inbox, or adds to its outbox. Other processes add to
        the inbox behind that message, and take from the outbox before what is added. So in every
        run, the first of these steps may be moved to the front. A fault elsewhere may use up the
        faults that are left, but then the death of this slot did not happen in that run. The same
        holds for any slot that does not run yet.

        If the slot can only receive, and sends nothing, its death before the step leads to the same
        state as its death after it.
        """
        slot_state = state.slots[index]
        view = self.look(slot_state.process)
        if self.world.has_exchange and view.value.runs:
            receive = self._independent_receive(state, index)
            return None if receive is None else (receive,)
        if view.requests:
            return None
        if not view.choices and not any(slot_state.channels):
            event = self._event(slot.Receive, slot_state.inbox[0])
            after = self._advance_quietly(slot_state.process, event)
            if after not in {None, slot_state.process}:
                return (self._receive(state, index),)
        return self._slot_steps(state, index)

    def _independent_receive(self, state: State, index: int) -> Step | None:
        """Return the step in which a slot with an exchange receives a barrier, if it is next.

        The barrier is held until the source emits it, which is a step of its own. So the step
        depends on no other one, and nothing is sent.
        """
        message = self.codes.value(state.slots[index].inbox[0])
        return self._receive(state, index) if isinstance(message, Barrier) else None

    def _quiet_hear(self, state: State, index: int) -> Step | None:
        """Return the step in which a driver hears a message that only counts, if it is one.

        The message adds a slot to a set: those that run, have acked, have committed or have ended
        their input, and the set is not complete. Or the message belongs to an attempt that is over.
        Nothing else that the driver may do depends on it, and its place among the driver's other
        steps changes no state after both.
        """
        slot_state = state.slots[index]
        if slot_state.driver < 0 or not self.variant.slot_checks_attempt:
            return None
        process = state.drivers[slot_state.driver].process
        if process == DOWN:
            return None
        fact = self.codes.value(slot_state.outbox[0])
        counts = isinstance(fact, attempt_facts.SlotMessageReceived) and isinstance(
            fact.message,
            (messages.Running, messages.Acked, messages.CommittedThrough, messages.SourceExhausted),
        )
        is_old = self._is_left_behind(state, slot_state)
        if not (counts or is_old):
            return None
        event = self._event(driver.Hear, slot_state.outbox[0])
        after = self._advance_quietly(process, event)
        if after is None or (is_old and after != process):
            return None
        return self._hear(state, index)

    def _advance_quietly(self, process: int, event: int) -> int | None:
        """Return the code of a process after `event`; None if it sends something, or breaks."""
        try:
            after, effects = self.advance(process, event)
        except BROKEN:
            return None
        return None if effects else after

    def _has_all_messages(self, state: State, number: int) -> bool:
        """Return True if a driver waits for no server, and has a message of each of its slots.

        Then the steps that it may take now are all that it may take next: messages that still
        arrive stand behind those. Its steps change its slots' inboxes behind what is there. So in
        every run, the first of its steps may be moved to the front.
        """
        view = self.look(state.drivers[number].process)
        own = [s for s in state.slots if s.driver == number]
        return (
            view.value.phase == "attempt"
            and not view.requests
            and len(own) >= self.world.slots
            and all(s.outbox for s in own)
        )

    def _private_list(self, state: State) -> Sequence[Step] | None:
        """Return the steps in which the only driver lists the log, if it is about to.

        No other process changes the log, so the answer is the same at any time. The driver's death
        before this step leads to the same state as its death after it.
        """
        log: Log = self.codes.value(state.log)
        if log.late is not None:
            return None
        for thread, code, request in self.look(state.drivers[0].process).requests:
            if isinstance(request, calls.ListRecords):
                replies = self._answers(state, code, request)
                return [self._answer_driver(state, 0, thread, reply) for reply in replies]
        return None

    def _calm_request(self, state: State) -> Sequence[Step] | None:
        """Return the step in which a target answers a slot, if no other step depends on it.

        No fault is left, one driver is left, and it only coordinates the attempt of all slots that
        are left. So no attempt begins any more: the target is not opened, and nothing is listed or
        rolled back. Requests of two subtasks are about different transactions. Messages that the
        slot receives before the answer or after it lead to the same state.
        """
        may_stop = self.world.savepoint is not None and not state.begins
        if state.faults or may_stop or not state.slots:
            return None
        if self.codes.value(state.log).late is not None:
            return None
        number = state.slots[0].driver
        if any(driver_state.process == DOWN for driver_state in state.drivers):
            return None
        values = [self.look(driver_state.process).value for driver_state in state.drivers]
        idle = [v.phase in {"over", "finished"} for n, v in enumerate(values) if n != number]
        own = values[number]
        if not all(idle) or own.phase != "attempt" or "sinks" in own.threads:
            return None
        if any((s.driver, s.attempt) != (number, own.attempt) for s in state.slots):
            return None
        for index, slot_state in enumerate(state.slots):
            if slot_state.process == GONE:
                continue
            for thread, code, request in self.look(slot_state.process).requests:
                replies = self._answers(state, code, request)
                return [self._answer_slot(state, index, thread, reply) for reply in replies]
        return None
