#!/bin/sh
# Makes a virtual environment from a Python of at least 3.11; usage: bootstrap.sh FOLDER
# As root on Debian or Ubuntu what is missing is installed; otherwise it is named. PYTHON picks an interpreter.
set -eu

usable() {
    command -v "$1" > /dev/null && "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2> /dev/null
}

find_python() {
    for python in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if usable "$python"; then
            echo "$python"
            return
        fi
    done
}

python=$(find_python)
if [ -z "$python" ] && [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q
    apt-get install -q -y --no-install-recommends python3 python3-venv ca-certificates
    python=$(find_python)
fi
if [ -z "$python" ]; then
    echo "error: Python 3.11 or newer with venv is needed and was not found." >&2
    echo "Debian 12 or newer, Ubuntu 24.04 or newer: sudo apt-get install python3 python3-venv; elsewhere: make PYTHON=/path/to/python3.11" >&2
    exit 1
fi
"$python" -m venv --clear "$1"
