#!/bin/bash
LC_ALL=C sort names.txt > sorted.txt
