"""Models cut into many tensors beside one tensor of the same total, each through a pull.

    python benchmarks/small_tensors.py                         everything, about two minutes
    python benchmarks/small_tensors.py --only views --rounds 5

Both sides of a ratio are pulls over `cma`, by the same two processes, in the same round, and
take turns at being first; what is reported is the median of the ratios, of the whole call. All
memory was touched once before. Results are saved in benchmarks/results/small_tensors.json.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from figures import MIB, Figure, Measured, Rounds, case_options, run_cases
from worker import Cluster, Remote

Sizes = list[tuple[str, int]]

SMALL: Sizes = [(f"expert.{i}", 4 << 10) for i in range(20_000)]
HIDDEN, INNER, VOCABULARY, LAYERS = 1104, 2968, 32_000, 32
"""Those of a Llama of 7 billion parameters (4096, 11008), scaled to 1 GiB in bfloat16."""


def layers_of_7b() -> Iterator[tuple[str, int]]:
    """Names and bytes of all its tensors."""
    yield "model.embed_tokens.weight", 2 * VOCABULARY * HIDDEN
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name in "qkvo":
            yield f"{at}.self_attn.{name}_proj.weight", 2 * HIDDEN * HIDDEN
        for name in ("gate", "up", "down"):
            yield f"{at}.mlp.{name}_proj.weight", 2 * HIDDEN * INNER
        for name in ("input", "post_attention"):
            yield f"{at}.{name}_layernorm.weight", 2 * HIDDEN
    yield "model.norm.weight", 2 * HIDDEN
    yield "lm_head.weight", 2 * VOCABULARY * HIDDEN


@dataclass(frozen=True)
class Case:
    """How the tensors lie, and in which order each side registers them."""

    what: str
    sizes: Sizes
    target: float
    views: bool = False
    shuffled: tuple[bool, bool] = (False, False)
    """Source, puller."""


CASES = {
    "alone": Case("20,000 x 4 KiB, allocated one by one", SMALL, 0.6),
    "views": Case("20,000 x 4 KiB, views of one buffer", SMALL, 0.8, views=True),
    "puller": Case(
        "the same, registered in another order by the puller", SMALL, 0.8, True, (False, True)
    ),
    "shuffled": Case("the same, in a random order by both", SMALL, 0.8, True, (True, True)),
    "layers": Case("291 tensors as of a 7B model, scaled", list(layers_of_7b()), 0.9),
}


def measure(case: Case, rounds: int) -> Measured:
    total = sum(size for _, size in case.sizes)
    seen = Rounds()
    with Cluster(2, transports=["cma"]) as (source, target):
        for worker, replica, shuffled in zip(
            (source, target), ("trainer", "rollout"), case.shuffled, strict=True
        ):
            worker.open_tensors("many", replica, case.sizes, case.views, shuffled)
            worker.open("one", replica, 1, total)
            worker.wait_for_huge_pages()
        extra = first_pull(source, target)
        for number in range(1, rounds + 1):
            for model in ("many", "one") if number % 2 else ("one", "many"):
                source.unpublish(model)
                source.write(model)
                seen.add(f"publish {model}", source.publish(model, number + 1))
                source.wait_for_digests(model)
                pull = target.replicate(model)
                if pull["bytes"] != total:
                    raise RuntimeError(f"{pull['bytes']} of {total} bytes were moved")
                seen.add_pull(model, pull)
        for model in ("many", "one"):
            if source.fingerprint(model) != target.fingerprint(model):
                raise RuntimeError(f"the bytes of {model} differ")
    figures = [
        compare(case.what, "", total, seen, (">=", case.target)),
        compare("- while bytes move", " moving", total, seen),
        Figure("- peak extra memory of the puller", extra / MIB, "MiB", ("<=", 64.0)),
    ]
    return figures, seen


def first_pull(source: Remote, target: Remote) -> int:
    """In which all is made that pulls need; returns how far the puller's memory grew."""
    for model in ("one", "many"):
        source.publish(model, 1)
        source.wait_for_digests(model)
    target.replicate("one")
    extra: int = target.replicate_peak("many")["extra_bytes"]
    return extra


def compare(
    what: str, key: str, total: int, seen: Rounds, target: tuple[str, float] | None = None
) -> Figure:
    detail = '"bare" is one tensor of the same total, pulled'
    return seen.against(
        f"one{key}", what, f"many{key}", total, target, unit="of one tensor", detail=detail
    )


def main() -> int:
    options = case_options(__doc__, CASES, rounds=15)
    return run_cases(
        "small_tensors",
        options,
        lambda name: measure(CASES[name], options.rounds),
        lambda name: f"{name}, {options.rounds} rounds",
        lambda name: sum(size for _, size in CASES[name].sizes),
    )


if __name__ == "__main__":
    sys.exit(main())
