#!/bin/sh
# What `make` needs before it makes anything, said in one line where it is missing. Usage: .ci/check.sh PYTHON
python=$1
if ! command -v "$python" >/dev/null 2>&1; then
  echo "make: no $python here; accepted: Python 3.11 or newer (make PYTHON=python3.12 ...)" >&2
  exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "make: $python is $("$python" --version 2>&1); accepted: Python 3.11 or newer (make PYTHON=python3.12 ...)" >&2
  exit 1
fi
if ! (mkdir -p .venv && touch .venv/.written && rm .venv/.written) 2>/dev/null; then
  echo "make: nothing can be written in $(pwd); accepted: a clone on a disk with room that this user may write to" >&2
  exit 1
fi
