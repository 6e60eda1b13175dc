#!/bin/bash
sed -i -e 's/^name = /name=/' -e 's/\$nam!/$name!/' greet.sh
