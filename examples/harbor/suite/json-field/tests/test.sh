#!/bin/bash
cd /app
reward=0
[ "$(tr -d '[:space:]' < email.txt 2> /dev/null)" = ada@example.org ] && reward=1
echo "$reward" > /logs/verifier/reward.txt
