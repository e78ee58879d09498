#!/usr/bin/env bash
# Prepares a bare Debian or Ubuntu: the libraries that MuJoCo and OpenCV load, and .venv with the pinned packages.
# May be run again at any time. `make setup` calls it when pyproject.toml, constraints.txt or this file has changed.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PATH:/usr/sbin:/sbin" # ldconfig, for users other than root

PYTHON="${PYTHON:-python3.11}"
LIBRARIES=(libOSMesa.so libEGL.so.1 libEGL_mesa.so.0 libGL.so.1 libglib-2.0.so.0)
PACKAGES=(libosmesa6 libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri libglib2.0-0)

stop() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# Installs Debian packages; fails where that is not possible.
install() {
    [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null || return 1
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

check_python() {
    command -v "$PYTHON" >/dev/null || stop "$PYTHON is not installed." \
        "Install it (Debian 12: apt-get install python3.11 python3.11-venv) or name another: make setup PYTHON=python3.12"
    "$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' ||
        stop "$PYTHON is $("$PYTHON" -V 2>&1); Python 3.11 or 3.12 is needed. Name one: make setup PYTHON=python3.11"
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || install "$(basename "$PYTHON")-venv" ||
        stop "$PYTHON cannot create virtual environments. Install the package $(basename "$PYTHON")-venv."
}

install_libraries() {
    local known library missing=()
    known="$(ldconfig -p)"
    for library in "${LIBRARIES[@]}"; do
        grep -qF "$library" <<<"$known" || missing+=("$library")
    done
    [ "${#missing[@]}" -eq 0 ] && return
    echo "setup: missing libraries: ${missing[*]}"
    install "${PACKAGES[@]}" || stop "These draw the simulator's images. Install them as root, then run this again:" \
        "    apt-get install -y ${PACKAGES[*]}"
}

check_python
[ "$(uname -s)" = Linux ] && install_libraries
[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
echo "setup: ready. .venv/bin/vla-rl --help"
