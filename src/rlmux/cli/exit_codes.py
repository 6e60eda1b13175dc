"""Exit codes of the process.

0    done                                2    the user's mistake: one line on stderr, nothing was started
1    it ran and something failed       130    Ctrl-C, at the next safe point
"""

FAILED, MISTAKE, INTERRUPTED = 1, 2, 130
