#!/bin/bash
tr '[:upper:] ' '[:lower:]\n' < poem.txt | LC_ALL=C sort -u > words.txt
