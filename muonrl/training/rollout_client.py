"""The learner's side of the rollout process: start it, talk to it, notice its death."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from muonrl.errors import InfrastructureError, MuonrlError
from muonrl.training.messages import Ack, Command, Event, Failed, Publish, Ready, Stop
from muonrl.training.rollout_process import RolloutSetup, main
from muonrl.training.weights import stage
from muonrl.trajectory import PolicyId

START_DEADLINE = 120.0
ACK_DEADLINE = 120.0
STOP_DEADLINE = 20.0

T = TypeVar("T")


class Interrupted(Exception):
    """The user asked to stop."""


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Keep Ctrl-C back for the length of the block; a process started in it begins with Ctrl-C blocked."""
    resource_tracker.ensure_running()  # its first start, inside the block, would end the blocking too early
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class RolloutClient:
    """Starts the rollout process and exchanges messages with it. Use as a context manager.

    A thread moves events from the pipe to a queue, so that the rollout process never waits for a busy learner.
    """

    def __init__(self, setup: RolloutSetup, staging: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, far = context.Pipe()
        self._process = context.Process(target=main, args=(far, setup), name="muonrl-rollouts", daemon=True)
        with _interrupts_held():  # until it ignores Ctrl-C by itself, it must not break off with a traceback
            self._process.start()
        far.close()
        self._staging = staging
        self._events: queue.Queue[Event | None] = queue.Queue()
        self._reader = threading.Thread(target=_pump, args=(self._connection, self._events), daemon=True)
        self._reader.start()
        self._held_back: list[Event] = []
        self.sync_seconds = 0.0

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self, interrupted: Callable[[], bool]) -> None:
        """Wait until the sandboxes stand. Raises what the rollout process reports, and Interrupted when asked to stop."""
        self._await(Ready, START_DEADLINE, "the sandboxes did not start", interrupted)

    def send(self, command: Command) -> None:
        """Queue a command for the rollout process."""
        try:
            self._connection.send(command)
        except (BrokenPipeError, ConnectionResetError) as fault:
            raise self._death() from fault

    def publish(self, policy: PolicyId, state: Mapping[str, Tensor]) -> None:
        """Stage weights and wait until the sampler acknowledges that it holds exactly these under ``policy``."""
        began = time.perf_counter()
        path, fingerprint = stage(self._staging, policy, state)
        self.send(Publish(policy, str(path), fingerprint))
        ack = self._await(Ack, ACK_DEADLINE, f"the sampler did not take the weights {policy}", lambda: False)
        path.unlink()
        if ack.policy != policy or ack.fingerprint != fingerprint:
            raise InfrastructureError("weight_sync", f"the sampler holds other weights than {policy}")
        self.sync_seconds += time.perf_counter() - began

    def _await(self, kind: type[T], deadline: float, what: str, interrupted: Callable[[], bool]) -> T:
        """The next event of ``kind``; the others keep their order for :meth:`event`."""
        end = time.monotonic() + deadline
        while time.monotonic() < end:
            if interrupted():
                raise Interrupted
            event = self._take(0.2)
            if isinstance(event, kind):
                return event
            if event is not None:
                self._held_back.append(event)
        raise InfrastructureError("deadline", f"{what} within {deadline:g} s")

    def event(self, timeout: float) -> Event | None:
        """The next event, or None after ``timeout`` seconds. Raises where the process failed or died."""
        if self._held_back:
            return self._held_back.pop(0)
        return self._take(timeout)

    def _take(self, timeout: float) -> Event | None:
        try:
            event = self._events.get(timeout=timeout)
        except queue.Empty:
            return None
        if event is None:
            raise self._death()
        if isinstance(event, Failed):
            raise (
                MuonrlError(event.text) if event.user else InfrastructureError("rollout_process", event.text)
            )
        return event

    def _death(self) -> InfrastructureError:
        self._process.join(2.0)
        return InfrastructureError(
            "rollout_process", f"the rollout process ended with code {self._process.exitcode}"
        )

    def close(self) -> None:
        """Stop the process with its sandboxes; it is killed if it does not end in time."""
        if self._process.is_alive():
            try:
                self._connection.send(Stop())
            except OSError:
                pass
            self._process.join(STOP_DEADLINE)
        for end in (self._process.terminate, self._process.kill):
            if self._process.is_alive():
                end()
                self._process.join(5.0)
        self._connection.close()
        self._reader.join(5.0)


def _pump(connection: Connection, events: queue.Queue[Event | None]) -> None:
    """Move events until the other side is gone, then put None."""
    try:
        while True:
            events.put(connection.recv())
    except (EOFError, OSError):
        events.put(None)
