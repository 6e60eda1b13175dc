#!/bin/bash
tail -n +2 sales.csv | awk -F, '{ sum += $2 } END { print sum }' > total.txt
