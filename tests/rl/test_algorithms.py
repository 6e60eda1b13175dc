import math

import pytest
import torch

from rlmux.rl.algorithms import ALGORITHMS, behavior_ratio, clipped_surrogate, is_clamped, kl_k3


def test_grpo_divides_by_the_groups_deviation() -> None:
    # mean 0.5, std of [0, 0, 1, 1] with n - 1 is sqrt(1/3)
    advantages = ALGORITHMS["grpo"].advantages([0.0, 0.0, 1.0, 1.0])
    assert advantages == pytest.approx([-0.8660254, -0.8660254, 0.8660254, 0.8660254], abs=1e-5)


def test_dr_grpo_only_centers() -> None:
    assert ALGORITHMS["dr-grpo"].advantages([0.0, 0.5, 1.0]) == [-0.5, 0.0, 0.5]


def test_rloo_compares_with_the_others() -> None:
    # 1 - (0 + 0.5) / 2, 0 - (1 + 0.5) / 2, 0.5 - (1 + 0) / 2
    assert ALGORITHMS["rloo"].advantages([1.0, 0.0, 0.5]) == pytest.approx([0.75, -0.75, 0.0])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_equal_rewards_teach_nothing(name: str) -> None:
    assert ALGORITHMS[name].advantages([0.1] * 7) == pytest.approx([0.0] * 7, abs=1e-9)


def test_trajectory_weights_follow_the_table() -> None:
    weights = {name: algorithm.trajectory_weight(8, 5, 20) for name, algorithm in ALGORITHMS.items()}
    assert weights == pytest.approx({"grpo": 1 / 40, "dr-grpo": 1 / 160, "rloo": 1 / 8})


def test_on_policy_the_gradient_is_minus_the_advantage() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    losses, is_clipped = clipped_surrogate(
        logprobs, logprobs.detach(), torch.tensor([0.5, -3.0]), clip_low=0.2, clip_high=0.2
    )
    losses.sum().backward()
    assert losses.tolist() == [-0.5, 3.0]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, 3.0]
    assert not is_clipped.any()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clips"),
    [
        (1.5, 1.0, -1.28, True),  # risen beyond clip_high: no more reward for going on
        (1.5, -1.0, 1.5, False),  # risen though bad: the full penalty stays
        (0.5, 1.0, -0.5, False),
        (0.5, -1.0, 0.8, True),  # fallen beyond clip_low
    ],
)
def test_the_clip_binds_on_one_side_only(ratio: float, advantage: float, loss: float, clips: bool) -> None:
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    losses, is_clipped = clipped_surrogate(
        logprobs, torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.28
    )
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss, rel=1e-5)
    assert is_clipped.item() is clips
    assert logprobs.grad is not None
    assert (logprobs.grad.item() == 0.0) is clips


def test_a_behavior_ratio_above_the_cap_gives_no_gradient_and_others_their_ratio():
    proximal = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    ratio, is_dropped = behavior_ratio(proximal, torch.tensor([-1.0, -2.0, -4.0, -0.5]), 5.0)
    assert ratio.tolist() == pytest.approx([1.0, math.e, 0.0, math.exp(-0.5)])
    assert is_dropped.tolist() == [False, False, True, False]
    assert not ratio.requires_grad


def test_k3_is_zero_where_both_agree_and_never_negative() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0])
    reference = torch.tensor([-1.0, -2.0, -0.5])
    expected = [0.0, math.exp(-1) + 1 - 1, math.exp(0.5) - 0.5 - 1]
    assert kl_k3(logprobs, reference).tolist() == pytest.approx(expected, abs=1e-6)


def test_one_outlier_leaves_losses_finite_and_the_gradient_of_others_alone() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -150.0], requires_grad=True)
    sampled = torch.tensor([-1.0, -200.0, -1.0])
    losses, _ = clipped_surrogate(logprobs, sampled, torch.tensor([2.0, -1.0, -1.0]), clip_low=0.2, clip_high=0.2)
    kl = kl_k3(logprobs, sampled)
    (losses.sum() + kl.sum()).backward()
    assert losses.isfinite().all()
    assert kl.isfinite().all()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-2.0, 0.0, 0.0]
    assert is_clamped(logprobs, sampled).tolist() == [False, True, True]
