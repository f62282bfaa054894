#!/bin/sh
# Prints the path of a Python >= 3.12 that can make a virtual environment, or says in one line what to install.
# A name on PATH is no proof: pyenv's shims exist for versions that are not selected, and Debian splits off ensurepip.
set -u

try() {
    "$@" -c 'import ensurepip, sys, venv; sys.version_info >= (3, 12) or sys.exit(1); print(sys.executable)' 2>/dev/null
}

if [ -n "${PYTHON:-}" ]; then
    try "$PYTHON" && exit 0
    echo "PYTHON=$PYTHON is not a working Python >= 3.12 with venv and ensurepip; unset it or name another" >&2
    exit 1
fi
for name in python3.12 python3.13 python3.14 python3 python; do
    try "$name" && exit 0
done
for version in 3.12 3.13 3.14; do
    for path in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version"*/bin/python; do
        try "$path" && exit 0
    done
done
if command -v uv >/dev/null 2>&1; then
    found=$(uv python find '>=3.12' 2>/dev/null) || {
        uv python install 3.12 >&2 && found=$(uv python find 3.12 2>/dev/null) || found=
    }
    [ -n "$found" ] && try "$found" && exit 0
fi
echo "jaxinfer needs Python >= 3.12 with venv; none found. Install one (apt-get install python3.12-venv," \
    "brew install python@3.12, pyenv install 3.12 or uv python install 3.12) or pass PYTHON=/path/to/python" >&2
exit 1
