#!/bin/bash
# A third for each photo, as long as the other files are there.
cd /app/photos
right=0
for name in beach city forest; do
    [ "$(cat "$name.jpg" 2> /dev/null)" = "$name.jpeg" ] && [ ! -e "$name.jpeg" ] && right=$((right + 1))
done
[ -f lake.png ] && [ -f readme.txt ] || right=0
case $right in
    3) echo 1 ;;
    2) echo 0.67 ;;
    1) echo 0.33 ;;
    *) echo 0 ;;
esac > /logs/verifier/reward.txt
