"""The demo's policy: two halves that only pass activations do what one whole would do."""

from __future__ import annotations

import multiprocessing
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as functional

from tensorhub_p2p.cli.demo import pipeline, policy, task
from tensorhub_p2p.cli.demo.pipeline import Link, LinkBroken
from tensorhub_p2p.cli.demo.plan import QUICK

PLAN = replace(QUICK, vocabulary=64, batch=32, patience=10.0)


def linked() -> tuple[Link, Link]:
    one, other = multiprocessing.get_context("spawn").Pipe()
    return Link(one, PLAN.patience), Link(other, PLAN.patience)


def sampled() -> tuple[torch.nn.Module, torch.nn.Module, torch.Tensor]:
    front, back = policy.half(PLAN, 0, 1), policy.half(PLAN, 1, 1)
    link, other = linked()
    thread = threading.Thread(target=pipeline.sample_back, args=(PLAN, back, other, 5))
    thread.start()
    generator = torch.Generator().manual_seed(3)
    sequences = pipeline.sample_front(PLAN, front, link, 5, generator)
    thread.join()
    return front, back, sequences


def test_a_sampled_sequence_is_the_task_then_an_answer_of_digits() -> None:
    _, _, sequences = sampled()
    assert sequences.shape == (PLAN.batch, PLAN.answer_from + PLAN.digits)
    assert (sequences[:, PLAN.digits] == task.SEPARATOR).all()
    assert (sequences[:, PLAN.answer_from :] < task.ALPHABET).all()


def test_only_the_right_digit_at_the_right_place_is_rewarded() -> None:
    sequence = torch.tensor([[3, 1, 2, 0, 9, task.SEPARATOR, 0, 1, 2, 9, 9]])
    assert task.rewards(PLAN, sequence).tolist() == [[1.0, 1.0, 1.0, 0.0, 1.0]]


def test_both_halves_get_the_gradients_that_one_whole_would_get() -> None:
    front, back, sequences = sampled()
    rewards = task.rewards(PLAN, sequences)
    link, other = linked()
    trainer = pipeline.BackTrainer(PLAN, sequences, rewards)
    thread = threading.Thread(target=trainer.gradients, args=(back, other, 5))
    thread.start()
    pipeline.gradients_front(front, link, 5, sequences)
    thread.join()
    split = [p.grad.clone() for half in (front, back) for p in half.parameters()]

    front.zero_grad()
    back.zero_grad()
    logits = back(front(sequences[:, :-1]))[:, PLAN.answer_from - 1 :]
    taken = functional.log_softmax(logits, dim=-1)
    taken = taken.gather(2, sequences[:, PLAN.answer_from :, None])[..., 0]
    advantage = rewards - rewards.mean(dim=0)
    (-(taken * advantage / (advantage.std() + 1e-6)).mean()).backward()
    whole = [p.grad for half in (front, back) for p in half.parameters()]
    for ours, expected in zip(split, whole, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


def test_what_is_left_over_from_a_broken_round_is_dropped() -> None:
    link, other = linked()
    other.send(4, torch.zeros(3))
    other.send(5, torch.ones(2, 2))
    assert link.receive(5).tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_a_partner_that_ended_is_noticed_at_once() -> None:
    link, other = linked()
    assert link.alive()
    other.close()
    assert not link.alive()
    with pytest.raises(LinkBroken):
        link.receive(1)


def test_a_silent_partner_is_given_up_after_the_patience() -> None:
    one, other = multiprocessing.get_context("spawn").Pipe()
    with pytest.raises(LinkBroken, match="said nothing"):
        Link(one, patience=0.01).receive(1)
    other.close()
