#!/bin/bash
# Half for the right names in a wrong order.
cd /app
expected=$(printf '%s\n' Adam Ben Ida Kim Lena Nora Omar Zoe)
reward=0
if [ "$(cat sorted.txt 2> /dev/null)" = "$expected" ]; then
    reward=1
elif [ "$(LC_ALL=C sort sorted.txt 2> /dev/null)" = "$expected" ]; then
    reward=0.5
fi
echo "$reward" > /logs/verifier/reward.txt
