#!/bin/bash
# A quarter for each line that is right.
cd /app
right=0
number=0
for expected in 'desserts' 'no evil' 'nomel on' 'emit UPG'; do
    number=$((number + 1))
    [ "$(sed -n "${number}p" reversed.txt 2> /dev/null)" = "$expected" ] && right=$((right + 1))
done
case $right in
    4) echo 1 ;;
    *) echo "0.$((right * 25))" ;;
esac > /logs/verifier/reward.txt
