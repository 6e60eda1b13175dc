#!/bin/bash
awk -F, '
    NR > 1 { rows = rows (NR > 2 ? "," : "") sprintf("{\"name\": \"%s\", \"city\": \"%s\", \"age\": %d}", $1, $2, $3) }
    END { print "[" rows "]" }
' people.csv > people.json
