#!/bin/bash
cd photos
for name in *.jpeg; do
    mv "$name" "${name%.jpeg}.jpg"
done
