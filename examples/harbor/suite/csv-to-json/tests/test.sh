#!/bin/bash
# 0.2 for a list of any kind, 0.6 for the right values with ages that are texts. White space does not count; the order of
# the keys does not either, since each object is looked for by its parts.
cd /app
text=$(tr -d '[:space:]' < people.json 2> /dev/null)
right=0
as_text=0
while IFS=, read -r name city age; do
    object=$(grep -o '{[^}]*}' <<< "$text" | grep -F "\"name\":\"$name\"" | grep -F "\"city\":\"$city\"")
    grep -qE "\"age\":$age[,}]" <<< "$object" && right=$((right + 1))
    grep -qF "\"age\":\"$age\"" <<< "$object" && as_text=$((as_text + 1))
done <<< $'Ada,London,36\nLinus,Helsinki,28\nGrace,NewYork,45'
num_objects=$(grep -o '{' <<< "$text" | wc -l)
reward=0
[[ $text == \[*\] ]] && reward=0.2
[[ $text == \[*\] && $num_objects = 3 && $((right + as_text)) = 3 ]] && reward=0.6
[[ $text == \[*\] && $num_objects = 3 && $right = 3 ]] && reward=1
echo "$reward" > /logs/verifier/reward.txt
