"""The gate alone: what is held leaves in its order, and each client that has something there is counted once."""

from __future__ import annotations

import random

from geventstalk.core.operate import Operate
from geventstalk.turn.replies import Channel, Operation, ReplyGate
from geventstalk.wire.session import Service, Session

Left = list[tuple[object, bytes]]


class Wire(Channel):
    def __init__(self, service: Service, left: Left) -> None:
        super().__init__(Session(service))
        self.left = left
        self.went_on = 0

    def send(self, data: bytes) -> None:
        self.left.append((self, data))

    def goes_on(self) -> None:
        self.went_on += 1


class Work(Operation):
    def __init__(self, left: Left) -> None:
        self.left = left

    def run(self, now_ns: int) -> bool:
        return True

    def done(self) -> None:
        self.left.append((self, b""))

    def failed(self) -> None:
        raise AssertionError("the gate gives nothing up")


def test_what_is_held_leaves_in_the_order_in_which_it_came(seed: int) -> None:
    draw = random.Random(seed)
    service = Service(Operate(0), 100, dict)
    gate = ReplyGate()
    left: Left = []
    held: Left = []
    gone: Left = []
    wires = [Wire(service, left) for _ in range(5)]
    for number in range(2_000):
        if draw.random() < 0.7:
            wire, data = draw.choice(wires), b"%d" % number
            gate.hold(wire, data)
            held.append((wire, data))
        elif draw.random() < 0.5:
            operation = Work(left)
            gate.hold_operation(operation)
            held.append((operation, b""))
        else:
            pieces = draw.randrange(4)
            gate.release(pieces)
            gone += held[:pieces]
            del held[:pieces]
        assert left == gone and gate.pieces == len(held)
        assert gate.clients == len({who for who, _ in held if isinstance(who, Wire)})
        assert [*gate.operations] == [who for who, _ in held if isinstance(who, Work)]
        for wire in wires:
            assert wire.held == sum(who is wire for who, _ in held)
            assert wire.held_bytes == sum(len(data) for who, data in held if who is wire)
            assert wire.went_on == sum(who is wire for who, _ in gone)


def test_who_comes_while_others_leave_is_not_let_out_with_them() -> None:
    """goes_on() may bring the next reply, which no sync covers yet."""
    gate = ReplyGate()
    left: Left = []
    service = Service(Operate(0), 100, dict)

    class Eager(Wire):
        def goes_on(self) -> None:
            super().goes_on()
            gate.hold(self, b"next")

    wire = Eager(service, left)
    gate.hold(wire, b"first")
    gate.release(gate.pieces)
    assert left == [(wire, b"first")] and (gate.pieces, gate.clients, wire.held) == (1, 1, 1)


def test_clients_that_also_wait_are_counted_once() -> None:
    service = Service(Operate(0), 100, dict)
    gate = ReplyGate()
    wires = [Wire(service, []) for _ in range(3)]
    for wire in wires[:2]:
        wire.session.receive(b"reserve\r\n", 0)
    for wire in (wires[0], wires[2], wires[0]):
        gate.hold(wire, b"x")
    gate.hold_operation(Work([]))
    assert gate.clients_that_also_wait() == 1
