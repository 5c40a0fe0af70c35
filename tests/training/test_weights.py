"""Weights reach the sampler whole, and only under the fingerprint that the learner announced."""

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from muonrl.errors import InfrastructureError, MuonrlError
from muonrl.training import weights
from muonrl.training.messages import Ack
from muonrl.training.rollout_client import Interrupted, RolloutClient
from muonrl.training.weights import clear_save_faults, fetch, fingerprint, stage
from muonrl.trajectory import PolicyId
from tests.training.cases import tiny_model


def state():
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(2, dtype=torch.int64)}


def test_any_bit_changes_the_fingerprint():
    before = fingerprint(state())
    assert fingerprint(state()) == before
    seen = {before}
    for bit in range(32):
        other = state()
        other["a"].view(torch.int32)[1, 2] ^= int(np.int32(np.uint32(1 << bit).view(np.int32)))
        seen.add(fingerprint(other))
    assert len(seen) == 33


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(a=s["a"].reshape(3, 2)),
        lambda s: s.update(a=s["a"].view(torch.int32)),
        lambda s: s.update(c=s.pop("a")),
        lambda s: s.pop("b"),
    ],
    ids=["shape", "dtype", "name", "missing"],
)
def test_names_shapes_and_types_count(change):
    other = state()
    change(other)
    assert fingerprint(other) != fingerprint(state())


def test_order_and_layout_do_not_count():
    given = state()
    transposed = {"b": given["b"], "a": given["a"].T.contiguous().T}
    assert not transposed["a"].is_contiguous()
    assert fingerprint(transposed) == fingerprint(given)


@pytest.mark.parametrize("tied", [True, False])
def test_a_staged_policy_comes_back_to_the_last_bit(tmp_path, tied):
    model = tiny_model(layers=1, tied=tied).bfloat16()
    path, digest = stage(tmp_path / "weights", PolicyId(2, 31), model.state_dict())
    assert [p.name for p in path.parent.iterdir()] == ["002-000031.safetensors"]
    got = fetch(path)
    assert fingerprint(got) == digest == fingerprint(model.state_dict())
    assert "lm_head.weight" in got  # a tied head stands under its own name too
    for name, tensor in model.state_dict().items():
        assert torch.equal(got[name], tensor)


def test_a_refused_write_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    def full(tensors, path):
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(MuonrlError, match=r"000-000001\.safetensors cannot be written: .*No space left"):
        stage(tmp_path, PolicyId(0, 1), state())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", [OSError(28, "No space left"), Exception("No space left on device")])
def test_every_way_to_say_that_the_disk_is_full(tmp_path, fault):
    with (
        pytest.raises(MuonrlError, match="cannot be written: .*(full|No space)"),
        clear_save_faults(tmp_path),
    ):
        raise fault


def test_other_faults_pass_through(tmp_path):
    with pytest.raises(KeyError), clear_save_faults(tmp_path):
        raise KeyError("x")


class Scripted(RolloutClient):
    """A client whose rollout process is a list of answers."""

    def __init__(self, staging, answers):
        self._staging, self.answers, self._held_back, self.sync_seconds = staging, answers, [], 0.0
        self.sent = []

    def send(self, command):
        self.sent.append(command)

    def _take(self, timeout):
        answer = self.answers.pop(0)
        return answer(self.sent[-1]) if callable(answer) else answer


def test_a_flip_needs_the_acknowledged_fingerprint(tmp_path):
    client = Scripted(tmp_path, ["kept for later", None, lambda c: Ack(c.policy, c.fingerprint)])
    client.publish(PolicyId(0, 1), state())
    assert client.sync_seconds > 0
    assert client.event(0.0) == "kept for later"
    assert list(tmp_path.iterdir()) == []  # staged files do not pile up


@pytest.mark.parametrize(
    "answer", [lambda c: Ack(c.policy, "0" * 64), lambda c: Ack(PolicyId(0, 0), c.fingerprint)]
)
def test_other_weights_than_announced_are_refused(tmp_path, answer):
    with pytest.raises(InfrastructureError, match="weight_sync: the sampler holds other weights"):
        Scripted(tmp_path, [answer]).publish(PolicyId(0, 1), state())


def test_waiting_for_the_sandboxes_can_be_interrupted(tmp_path):
    with pytest.raises(Interrupted):
        Scripted(tmp_path, [None]).wait_ready(lambda: True)
