#!/bin/bash
cd /app
reward=0
[ "$(tr -d '[:space:]' < total.txt 2> /dev/null)" = 147 ] && reward=1
echo "$reward" > /logs/verifier/reward.txt
