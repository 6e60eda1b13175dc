"""A training loop of one's own that shares a device: policy gradients for a tiny network, torch and nothing else.

    rlmux broker examples/09_permits.yaml             prints: export RLMUX_BROKER=unix:...
    RLMUX_JOB=a python examples/own_trainer.py        in one terminal, with that variable set
    RLMUX_JOB=b python examples/own_trainer.py        in another one

Without RLMUX_BROKER the same program runs alone, and ends with the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import torch

from rlmux import share


def rewards_of(actions: torch.Tensor) -> torch.Tensor:
    """What the program's user thinks up; here a slow judge of even numbers."""
    time.sleep(0.02)
    return (actions % 2 == 0).float()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random = torch.Generator(device).manual_seed(args.seed)
    job = share.join("own-trainer")
    with job.phase("train"):  # the model is made on the device, so it is made with a permit
        torch.manual_seed(args.seed)
        model = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.Tanh(), torch.nn.Linear(256, 32)).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        job.on_leave("train", share.torch_offload(model, optimizer))
        for number in range(1, args.steps + 1):
            with job.phase("rollout", step=number):
                states = torch.randn(64, 16, generator=random, device=device)
                logprobs = model(states).log_softmax(-1)
                actions = torch.multinomial(logprobs.detach().exp(), 1, generator=random)
            with job.phase(None):  # rewards need no device: another program may have it
                rewards = rewards_of(actions.cpu()).to(device)
            advantages = rewards - rewards.mean()
            logprobs = model(states).log_softmax(-1).gather(1, actions)
            optimizer.zero_grad()
            (-(advantages * logprobs).mean()).backward()
            optimizer.step()
            job.safe_point()
        weights = torch.cat([one.detach().flatten().cpu() for one in model.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    print(f"reward {rewards.mean():.2f}, weights {digest}, waited {job.waited_s:.1f} s", flush=True)


if __name__ == "__main__":
    main()
