#!/bin/sh
# Install packages into .venv at the versions of constraints.txt: by uv where it can be had, by pip where not.
# Usage: .ci/install.sh BIN PACKAGE...      BIN: the environment's folder of programs. CONSTRAINTS= takes newest versions.
bin=$1
shift
constraints=${CONSTRAINTS-constraints.txt}
with=${constraints:+--constraint $constraints}
if [ ! -x "$bin/uv" ]; then
  # shellcheck disable=SC2086
  "$bin/python" -m pip install --quiet --disable-pip-version-check $with uv 2>/dev/null ||
    echo "no uv: pip installs, which takes some minutes longer"
fi
if [ -x "$bin/uv" ]; then
  # uv looks where pip was told to look.
  UV_FIND_LINKS=${UV_FIND_LINKS-${PIP_FIND_LINKS-}}
  SSL_CERT_FILE=${SSL_CERT_FILE-${PIP_CERT-}}
  [ -n "$UV_FIND_LINKS" ] && export UV_FIND_LINKS || unset UV_FIND_LINKS
  [ -n "$SSL_CERT_FILE" ] && export SSL_CERT_FILE || unset SSL_CERT_FILE
  # shellcheck disable=SC2086
  "$bin/uv" pip install --quiet --python "$bin/python" --link-mode copy --compile-bytecode $with "$@" && exit 0
  echo "uv could not install these: pip tries"
fi
# shellcheck disable=SC2086
"$bin/python" -m pip install --quiet --disable-pip-version-check $with "$@" && exit 0
echo "make: packages could not be installed: $(df -Pm . | awk 'NR==2 {print $4}') MB are free here, 6000 are needed; the error is above" >&2
exit 1
