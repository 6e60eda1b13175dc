"""An agent that guesses a digit: each guess is looked up somewhere, which takes a while."""

import time

from chat import TASK, ask, report

LOOKUP_S = 0.5
MOST_GUESSES = 4


def main() -> None:
    secret = int(TASK["row"]["answer"])
    messages = list(TASK["row"]["prompt"])
    for number in range(MOST_GUESSES):
        answer = ask(messages, max_tokens=2)[:1]
        time.sleep(LOOKUP_S)
        if not answer.isdigit():
            report(0.0)
            return
        if int(answer) == secret:
            report(1.0 - 0.2 * number)
            return
        messages.append({"role": "user", "content": "more" if int(answer) < secret else "less"})
    report(0.1)


main()
