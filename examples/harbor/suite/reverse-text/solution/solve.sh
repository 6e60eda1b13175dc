#!/bin/bash
awk '{ line = ""; for (i = length($0); i > 0; i--) line = line substr($0, i, 1); print line }' message.txt > reversed.txt
