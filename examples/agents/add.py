"""An agent that adds, has its answer checked by a slow tool, and asks a second chat for another try."""

import time

from chat import TASK, ask, report

CHECK_S = 1.0


def main() -> None:
    right = TASK["row"]["answer"]
    messages = list(TASK["row"]["prompt"])
    first = ask(messages).strip()
    time.sleep(CHECK_S)
    if first == right:
        report(1.0)
        return
    second = ask(list(TASK["row"]["prompt"])).strip()
    report(0.6 if second == right else 0.2 * (first[:1] == right[:1]))


main()
