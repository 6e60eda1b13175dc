#!/bin/bash
# A file with another number earns a little: it was written where it should be.
cd /app
reward=0
if [ -s count.txt ]; then
    reward=0.1
    [ "$(tr -d '[:space:]' < count.txt)" = 23 ] && reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
