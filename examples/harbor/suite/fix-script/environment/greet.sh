#!/bin/bash
# Usage: bash greet.sh NAME
name = $1
echo "Hello, $nam!"
