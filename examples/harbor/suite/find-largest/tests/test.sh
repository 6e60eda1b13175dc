#!/bin/bash
# Half for the right file with its folder.
cd /app
case "$(tr -d '[:space:]' < largest.txt 2> /dev/null)" in
    beta.txt) echo 1 ;;
    */beta.txt) echo 0.5 ;;
    *) echo 0 ;;
esac > /logs/verifier/reward.txt
