"""A reward of verl's signature, for tests."""


def score(data_source: str, solution_str: str, ground_truth: str, extra_info=None, **_) -> float:
    """Share of letters in an answer."""
    return sum(sign.isascii() and sign.isalpha() for sign in solution_str) / (1 + len(solution_str))
