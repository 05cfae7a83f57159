"""The smallest trainer: it trains a little model and publishes every step as a version."""

import argparse
import time

import torch

import tensorhub_p2p as th

options = argparse.ArgumentParser()
options.add_argument("--bind", default="127.0.0.1:7946", help="address for others to join")
options.add_argument("--seed", action="append", help="a peer that runs already, if any")
options.add_argument("--steps", type=int, default=20)
options.add_argument("--seconds", type=float, default=1.0, help="how long a version stays")
options = options.parse_args()

torch.manual_seed(0)
x, y = torch.randn(64, 512), torch.randn(64, 512)
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Tanh(), torch.nn.Linear(512, 512))
optimizer = torch.optim.SGD(model.parameters(), lr=10.0)

with (
    th.Peer(cluster="example", bind=options.bind, seeds=options.seed) as peer,
    peer.open("policy", replica="trainer") as handle,
):
    print(f"trainer at {peer.address}", flush=True)
    handle.register(model)
    # Versions only rise: go on above what others hold from an earlier run.
    first = max((info.version for info in peer.versions("policy")), default=0) + 1
    for version in range(first, first + options.steps):
        loss = torch.nn.functional.mse_loss(model(x), y)
        handle.publish(version)  # from here on others read the tensors where they lie
        print(f"published version {version}, loss {loss.item():.6f}", flush=True)
        time.sleep(options.seconds)  # a real trainer waits for its rollouts' samples here
        handle.unpublish()  # from here on the tensors may change
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
