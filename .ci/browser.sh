#!/bin/sh
# A Chromium for the browser tests: one that is there, or Debian's where this user may install it. Never an error:
# the tests say themselves that they have none.
if [ -n "$RLMUX_CHROMIUM" ] || command -v chromium >/dev/null 2>&1; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
  echo "no chromium: the browser tests skip; install one, or set RLMUX_CHROMIUM"
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
{ timeout 120 apt-get -qq update && timeout 300 apt-get -qq install -y --no-install-recommends chromium; } >/dev/null 2>&1 ||
  echo "no chromium: apt-get could not install it; the browser tests skip"
exit 0
