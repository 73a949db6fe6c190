# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# What the scripts in this folder share. Sourced from the repository's root.

MIN_PYTHON_MINOR=10

say() { printf '==> %s\n' "$*"; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# A value on which a finished piece of set-up depends: the content of the files named and the
# interpreter's version.
fingerprint() {
    { "${PYTHON:-python3}" --version && cat "$@"; } 2>&1 | sha256sum | cut -d ' ' -f 1
}

# is_done STAMP FINGERPRINT: that piece of set-up has been finished with exactly these inputs.
is_done() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Install Debian packages, or name them where that takes another user or another system.
need_packages() {
    if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
        die "install these packages with your system's package manager (Debian's names), then run" \
            "this again: $*"
    fi
    say "apt: installing $*"
    local log
    log=$(mktemp)
    if ! { apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"; } \
        >"$log" 2>&1; then
        cat "$log" >&2
        rm -f "$log"
        die "apt-get could not install: $*"
    fi
    rm -f "$log"
}

# The interpreter that virtual environments are made from: $PYTHON, else python3.
need_python() {
    local python=${PYTHON:-python3}
    if ! command -v "$python" >/dev/null; then
        [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON is not a command"
        need_packages python3 python3-venv
    fi
    "$python" -c "import sys; sys.exit(sys.version_info < (3, $MIN_PYTHON_MINOR))" ||
        die "$("$python" --version) is too old: install Python 3.$MIN_PYTHON_MINOR or newer, or name one:" \
            "make PYTHON=/path/to/python3"
}

# make_venv FOLDER: a virtual environment there, unless there is one already.
make_venv() {
    local venv=$1 python=${PYTHON:-python3}
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 && return
    need_python
    # Debian and Ubuntu ship the standard library's venv without the pip that it installs.
    "$python" -c 'import ensurepip, venv' 2>/dev/null || need_packages python3-venv
    say "creating $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
}

# pip_install VENV ARGUMENTS...: quiet unless it fails.
pip_install() {
    local venv=$1
    shift
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --no-warn-script-location "$@"
}
