"""Ray: an actor puts its tensor into the object store, another gets it and copies it in.

One process, Ray's driver, with both actors. Settings: `as_numpy` (put the tensor's numpy view,
which Ray stores without pickling it; default: the tensor as it is).
"""

from __future__ import annotations

from typing import Any

import ray
from serving import Side, Span, Stopwatch, serve


@ray.remote(num_cpus=1)
class Holder(Side):
    """An actor with a tensor."""

    def put(self) -> list[Any]:
        return [ray.put(self.tensor.numpy() if self.settings.get("as_numpy") else self.tensor)]

    def get(self, references: list[Any]) -> None:
        import torch

        value = ray.get(references[0])
        self.tensor.copy_(torch.from_numpy(value) if self.settings.get("as_numpy") else value)


class Both(Side):
    def __init__(self, size: int, **settings: Any) -> None:
        super().__init__(4, **settings)
        ray.init(
            num_cpus=2,
            object_store_memory=3 * size,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONWARNINGS": "ignore"}},
        )
        self.holders = [Holder.remote(size, **settings) for _ in range(2)]

    def write(self) -> None:
        ray.get(self.holders[0].write.remote())

    def fingerprint(self, which: int = 0) -> str:
        told: str = ray.get(self.holders[which].fingerprint.remote())
        return told

    def take(self) -> Span:
        source, target = self.holders
        with Stopwatch() as watch:
            references = ray.get(source.put.remote())
            ray.get(target.get.remote(references))
        del references
        return watch.span

    def close(self) -> None:
        ray.shutdown()


if __name__ == "__main__":
    serve({"both": Both})
