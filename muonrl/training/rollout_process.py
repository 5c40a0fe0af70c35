"""The rollout process: sampler, agents, sandboxes and grader in one event loop, beside the learner's process."""

from __future__ import annotations

import asyncio
import ctypes
import resource
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer

from muonrl.agents.loop import run_episode
from muonrl.config import Config
from muonrl.errors import InfrastructureError, MuonrlError
from muonrl.grading.grader import Grader
from muonrl.policy.tokenizer import ChatFormat
from muonrl.sampling.decoder import Shape, Weights
from muonrl.sampling.engine import Engine
from muonrl.sandbox import make_provider
from muonrl.sandbox.protocol import SandboxProvider
from muonrl.tasks.schema import RepairTask
from muonrl.training.messages import (
    Ack,
    Command,
    Dropped,
    Event,
    Failed,
    Finished,
    Publish,
    Ready,
    RolloutRequest,
    Stop,
    Usage,
)
from muonrl.training.weights import fetch, fingerprint
from muonrl.trajectory import Trajectory, derive_seed

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RolloutSetup:
    """Everything that the rollout process needs to begin. ``model_folder`` gives tokenizer and model config."""

    config: Config
    model_folder: str
    tasks: tuple[RepairTask, ...]


def main(connection: Connection, setup: RolloutSetup) -> None:
    """Entry point of the process. Ctrl-C is the learner's business; the learner's death ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked while it started
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    torch.set_num_threads(setup.config.run.threads_sampler)
    try:
        asyncio.run(_Rollouts(connection, setup).serve())
    except (MuonrlError, OSError, RuntimeError, ValueError, InfrastructureError, ExceptionGroup) as fault:
        _report(connection, fault)


def _report(connection: Connection, fault: Exception) -> None:
    """Tell the learner what ended this process, if it is still there to be told."""
    while isinstance(fault, ExceptionGroup):  # of a task group: the first fault is what ended the others
        fault = fault.exceptions[0]
    user = isinstance(fault, MuonrlError)
    text = str(fault) if user else f"{type(fault).__name__}: {fault}"
    try:
        connection.send(Failed(" ".join(text.split()), user))
    except OSError:
        pass


class _Rollouts:
    def __init__(self, connection: Connection, setup: RolloutSetup) -> None:
        self.connection = connection
        self.config = setup.config
        self.tasks = {task.task_id: task for task in setup.tasks}
        folder = setup.model_folder
        self.shape = Shape.of(AutoConfig.from_pretrained(folder, local_files_only=True))
        self.chat = ChatFormat(AutoTokenizer.from_pretrained(folder, local_files_only=True))
        self.engine = Engine(
            self.shape,
            end_id=self.chat.end_id,
            slots=self.config.sandbox.concurrency,
            max_context=self.config.model.max_context,
            mode=self.config.weights.mode,
            temperature=self.config.agent.temperature,
        )
        self.queue: asyncio.Queue[RolloutRequest] = asyncio.Queue()
        self.stopping = asyncio.Event()
        self.began = time.perf_counter()
        self.sandboxes, self.sandbox_seconds = 0, 0.0
        self.gradings, self.gradings_cached, self.grade_seconds = 0, 0, 0.0

    async def serve(self) -> None:
        """Run until told to stop or until the learner's process is gone."""
        provider = make_provider(self.config.sandbox)
        await provider.start()
        try:
            self.grader = Grader(
                provider, cache=self.config.grading.cache, timeout=self.config.grading.timeout
            )
            loop = asyncio.get_running_loop()
            loop.add_reader(self.connection.fileno(), self._receive)
            loop.add_signal_handler(signal.SIGTERM, self.stopping.set)
            async with asyncio.TaskGroup() as group:
                jobs = [group.create_task(self.engine.run())]
                jobs += [
                    group.create_task(self._play_all(provider))
                    for _ in range(self.config.sandbox.concurrency)
                ]
                self._send(Ready())
                await self.stopping.wait()
                loop.remove_reader(self.connection.fileno())
                for job in jobs:
                    job.cancel()
        finally:
            await provider.close()

    def _send(self, event: Event) -> None:
        try:
            self.connection.send(event)
        except (BrokenPipeError, ConnectionResetError):
            self.stopping.set()

    def _receive(self) -> None:
        try:
            while self.connection.poll():
                self._obey(self.connection.recv())
        except (EOFError, ConnectionResetError):
            self.stopping.set()

    def _obey(self, command: Command) -> None:
        match command:
            case RolloutRequest():
                self.queue.put_nowait(command)
            case Publish():
                state = fetch(Path(command.path))
                held = fingerprint(state)
                if held == command.fingerprint:
                    self.engine.publish(command.policy, Weights(state, self.shape))
                self._send(Ack(command.policy, held))
            case Stop():
                self.stopping.set()

    async def _play_all(self, provider: SandboxProvider) -> None:
        while True:
            request = await self.queue.get()
            try:
                trajectory = await self._play(provider, request)
            except InfrastructureError as fault:
                self._send(Dropped(request, fault.reason, fault.detail))
            else:
                self._send(Finished(request, trajectory))
            self._send(self._usage())

    async def _play(self, provider: SandboxProvider, request: RolloutRequest) -> Trajectory:
        task = self.tasks[request.task_id]
        began = time.perf_counter()
        session = await self.engine.open()
        try:
            opened = time.perf_counter()
            sandbox = await provider.acquire()
            try:
                await sandbox.put(task.base)
                self.sandboxes += 1
                self.sandbox_seconds += time.perf_counter() - opened
                episode = await run_episode(
                    session,
                    sandbox,
                    self.chat,
                    task.problem_statement,
                    self.config.agent,
                    max_context=self.config.model.max_context,
                    tool_timeout=self.config.sandbox.tool_timeout,
                    seed_of=lambda turn: derive_seed(request.seed, "turn", turn),
                )
                after = await sandbox.snapshot()
            finally:
                await sandbox.close()
        finally:
            session.close()
        if not episode.turns:
            raise InfrastructureError(
                "prompt_too_long", f"{task.task_id}: no room for a reply in the context"
            )
        self.sandbox_seconds += episode.tool_seconds
        grade = await self.grader.grade(task, after)
        self.gradings += 1
        self.gradings_cached += grade.cached
        self.grade_seconds += grade.seconds
        return Trajectory(
            id=request.id,
            task_id=task.task_id,
            visit=request.visit,
            turns=tuple(episode.turns),
            grade=grade,
            dispatched_at=request.dispatched_at,
            value_at_dispatch=request.value,
            seed=request.seed,
            stop=episode.stop,
            seconds=time.perf_counter() - began,
        )

    def _usage(self) -> Usage:
        return Usage(
            busy_seconds=self.engine.busy_seconds,
            sampled_tokens=self.engine.sampled_tokens,
            fed_tokens=self.engine.fed_tokens,
            gradings=self.gradings,
            gradings_cached=self.gradings_cached,
            grade_seconds=self.grade_seconds,
            sandboxes=self.sandboxes,
            sandbox_seconds=self.sandbox_seconds,
            rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            wall_seconds=time.perf_counter() - self.began,
        )
