#!/bin/bash
ls -S data | head -n 1 > largest.txt
