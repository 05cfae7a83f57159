"""The smallest rollout: it follows the trainer, version by version."""

import argparse

import torch

import tensorhub_p2p as th

options = argparse.ArgumentParser()
options.add_argument("--seed", action="append", required=True, help="address of any peer")
options.add_argument("--bind", default="127.0.0.1:0", help="the own address, 0: any free port")
options.add_argument("--patience", type=float, default=10.0, help="seconds to wait for a version")
options = options.parse_args()

torch.manual_seed(0)  # the trainer's data …
x, y = torch.randn(64, 512), torch.randn(64, 512)
torch.seed()  # … but weights of its own, for now
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Tanh(), torch.nn.Linear(512, 512))

with (
    th.Peer(cluster="example", bind=options.bind, seeds=options.seed) as peer,
    peer.open("policy") as handle,  # a replica of its own, with a name of its own
):
    print(f"rollout at {peer.address}", flush=True)
    handle.register(model)
    version = -1
    while True:
        try:
            handle.wait_for(newer_than=version, timeout=options.patience)
            pull = handle.replicate("latest", timeout=options.patience)
        except th.Timeout as error:
            print(f"that was the last one ({error})", flush=True)
            break
        except (th.VersionUnavailable, th.GroupBroken) as error:
            print(f"lost its source, waiting for another ({error})", flush=True)
            version = -1  # begin again as a fresh process would
            continue
        version = pull.version
        loss = torch.nn.functional.mse_loss(model(x), y)
        print(f"pulled version {version}, loss {loss.item():.6f}", flush=True)
        print(peer.explain(pull), flush=True)
