import torch

import tensorhub_p2p as th

trained, wanted = torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)

with th.Peer(cluster="hello") as trainer, th.Peer("hello", seeds=[trainer.address]) as rollout:
    source, target = trainer.open("policy"), rollout.open("policy")
    source.register(trained)
    source.publish(1)  # others may read the tensors where they lie
    target.register(wanted)
    pull = target.replicate("latest")  # the bytes come straight from there, each one checked
    print(rollout.explain(pull))
    assert torch.equal(trained.weight, wanted.weight)
    source.unpublish()  # the trainer's tensors may change again
    print(rollout.versions("policy"))  # the rollout holds the version now, and serves it
