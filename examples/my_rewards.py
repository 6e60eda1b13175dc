"""Two rewards for `file_rewards.yaml`, one in each of the two signatures the field uses."""


def score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's: one response at a time. The share of characters in the right place."""
    right = sum(given == wanted for given, wanted in zip(solution_str, ground_truth, strict=False))
    return right / max(len(solution_str), len(ground_truth), 1)


def brevity(prompts, completions, answer, **columns):
    """TRL's: all responses to one prompt at once. Right answers, and among them the shorter ones, score more.

    A column of the file arrives under its own name, once for each completion.
    """
    rewards = []
    for completion, wanted in zip(completions, answer, strict=True):
        is_right = wanted in completion
        rewards.append((1.0 if is_right else 0.0) - 0.02 * len(completion))
    return rewards
