#!/bin/bash
grep '"Ada"' users.json | sed 's/.*"email": "\([^"]*\)".*/\1/' > email.txt
