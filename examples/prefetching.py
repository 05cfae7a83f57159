"""A rollout that goes on working with its weights while the next ones come."""

import numpy

import tensorhub_p2p as th

with (
    th.Peer(cluster="prefetching") as first,
    th.Peer(cluster="prefetching", seeds=[first.address]) as second,
    first.open("policy", replica="trainer") as trainer,
    second.open("policy") as rollout,
):
    trained, used = numpy.zeros(32 << 20, numpy.uint8), numpy.zeros(32 << 20, numpy.uint8)
    trainer.register({"weights": trained})
    rollout.register({"weights": used})

    version = 0
    for step in (1, 2, 3):
        trained[:] = step
        trainer.publish(step)
        rollout.wait_for(newer_than=version)
        ahead = rollout.prefetch("latest")  # into host memory, in the background
        while not ahead.done():
            assert used.max() == version  # "generating", with the weights that are there
        pull = rollout.replicate("latest")  # now they change: a copy from host memory
        version = pull.version
        print(f"version {version}: {pull.prefetched} bytes were here, {pull.over_links} came")
        assert used.min() == used.max() == version
        trainer.unpublish()
