# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# What the scripts in this folder share. Sourced from the repository's root.

MIN_PYTHON_MINOR=10

say() { printf '==> %s\n' "$*"; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# One set-up at a time in this checkout, until the script that asks for it ends.
lock_setup() {
    command -v flock >/dev/null || return 0
    mkdir -p build
    exec 9>build/.setup.lock
    flock --nonblock 9 || {
        say "waiting for another set-up in this checkout"
        flock 9
    }
}

# step STAMP SAYS FILES... -- COMMAND...: run the command, unless it has succeeded before with the
# same content of these files. STAMP remembers it.
step() {
    local stamp=$1 says=$2 inputs=() wanted
    shift 2
    while [ "$1" != -- ]; do
        inputs+=("$1")
        shift
    done
    shift
    wanted=$(cat "${inputs[@]}" | sha256sum)
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    say "$says"
    "$@"
    echo "$wanted" >"$stamp"
}

can_apt() { [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; }

# Run a command silently, and show what it printed where it fails.
quietly() {
    local log
    log=$(mktemp)
    if ! "$@" >"$log" 2>&1; then
        cat "$log" >&2
        rm -f "$log"
        return 1
    fi
    rm -f "$log"
}

# Install Debian packages, or name them where that takes another user or another system.
need_packages() {
    can_apt || die "missing on this machine: $* (the names of Debian's packages)." \
        "Install them as root, then run this again."
    say "apt: installing $*"
    quietly apt-get update -q || die "apt-get update failed"
    DEBIAN_FRONTEND=noninteractive quietly apt-get install -y -q --no-install-recommends "$@" ||
        die "apt-get could not install: $*"
}

# The interpreter that virtual environments are made from: $PYTHON, else python3.
need_python() {
    local python=${PYTHON:-python3}
    if ! command -v "$python" >/dev/null; then
        [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON is not a command"
        need_packages python3 python3-venv
    fi
    "$python" -c "import sys; sys.exit(sys.version_info < (3, $MIN_PYTHON_MINOR))" ||
        die "$("$python" --version) is too old: install Python 3.$MIN_PYTHON_MINOR or newer, and" \
            "name it: make PYTHON=python3.$MIN_PYTHON_MINOR ..."
    # Debian and Ubuntu ship the standard library's venv without the pip that it installs.
    "$python" -c 'import ensurepip, venv' 2>/dev/null || need_packages \
        "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
}

# The environment works, belongs to this folder (its scripts hold its path) and, where PYTHON names
# an interpreter, is of that one's version.
venv_fits() {
    local version='import sys; print(sys.version_info[:2])' have
    have=$("$1/bin/python" -c "import pip; $version" 2>/dev/null) || return
    head -n 3 "$1/bin/pip" | grep -qF "$PWD/$1/bin/" || return
    [ -z "${PYTHON:-}" ] || [ "$have" = "$("$PYTHON" -c "$version")" ]
}

# make_venv FOLDER: a virtual environment there, unless a fitting one is there already.
make_venv() {
    venv_fits "$1" && return
    need_python
    say "creating $1 with $("${PYTHON:-python3}" --version)"
    "${PYTHON:-python3}" -m venv --clear "$1"
}

# pip_install VENV ARGUMENTS...
pip_install() {
    local python=$1/bin/python
    shift
    quietly "$python" -m pip install --disable-pip-version-check --progress-bar off "$@" ||
        die "pip could not install: $*"
}
