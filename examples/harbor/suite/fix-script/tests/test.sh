#!/bin/bash
# Half for each name: the second one has a space.
cd /app
right=0
for name in Ada 'Grace Hopper'; do
    [ "$(bash greet.sh "$name" 2>&1)" = "Hello, $name!" ] && right=$((right + 1))
done
case $right in
    2) echo 1 ;;
    1) echo 0.5 ;;
    *) echo 0 ;;
esac > /logs/verifier/reward.txt
