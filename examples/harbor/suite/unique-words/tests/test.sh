#!/bin/bash
# Half for the right words in a wrong order, or more than once.
cd /app
expected=$(printf '%s\n' and moon of sea sun the)
reward=0
if [ "$(cat words.txt 2> /dev/null)" = "$expected" ]; then
    reward=1
elif [ "$(LC_ALL=C sort -u words.txt 2> /dev/null)" = "$expected" ]; then
    reward=0.5
fi
echo "$reward" > /logs/verifier/reward.txt
