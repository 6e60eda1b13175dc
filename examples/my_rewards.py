"""Two rewards for `03_file_rewards.yaml`: one with the signature of verl, one with the signature of TRL."""


def score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's signature: one response at a time. The reward is the fraction of characters in the right place."""
    right = sum(given == wanted for given, wanted in zip(solution_str, ground_truth, strict=False))
    return right / max(len(solution_str), len(ground_truth), 1)


def brevity(prompts, completions, answer, **columns):
    """TRL's signature: all responses to one prompt at once. A right answer scores more, and a shorter one a bit more.

    Each column of the file is an argument of that name: a list with one value for each completion.
    """
    rewards = []
    for completion, wanted in zip(completions, answer, strict=True):
        is_right = wanted in completion
        rewards.append((1.0 if is_right else 0.0) - 0.02 * len(completion))
    return rewards
