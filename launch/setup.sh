#!/usr/bin/env bash
# Makes the virtual environment of this checkout: torch, the pinned packages, the project itself (editable).
# Usage: launch/setup.sh              run it again at any time; with nothing to do it ends at once
#   PYTHON=python3.12                 the interpreter to build on (3.11 or newer)
#   TRL_EXT_VENV=/some/folder         where to put the environment, absolute (default: .venv beside pyproject.toml)
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${TRL_EXT_VENV:-$root/.venv}"
stamp="$venv/.trl_ext_setup"
torch_requirement="torch==2.13.0"

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

fingerprint() {
    # $1: the interpreter. A moved checkout or environment counts as a change: both paths are written into the files.
    "$1" - "$root/requirements.lock" "$root/pyproject.toml" "${BASH_SOURCE[0]}" "$root" "$venv" <<'PYTHON'
import hashlib, sys
digest = hashlib.sha256(repr((sys.version, sys.argv[4:])).encode())
for name in sys.argv[1:4]:
    with open(name, "rb") as file:
        digest.update(file.read())
print(digest.hexdigest())
PYTHON
}

is_current() {
    [[ -f "$stamp" && -x "$venv/bin/python" ]] || return 1
    [[ -z "${PYTHON:-}" || "$(python_version "$PYTHON")" == "$(python_version "$venv/bin/python")" ]] || return 1
    [[ "$(<"$stamp")" == "$(fingerprint "$venv/bin/python")" ]]
}

python_version() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null || true; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    if [[ -n "${PYTHON:-}" ]]; then
        command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON: no such program"
        is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is Python $(python_version "$PYTHON"); 3.11 or newer is needed"
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3 python python3.14 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null && is_new_enough "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer on PATH (python3 is ${1:-missing}); install one, or name it: PYTHON=/path/to/python3.12"
}

make_venv() {
    local python="$1"
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$python has no venv module; on Debian or Ubuntu: apt-get install python3-venv"
    # --clear: a half-made environment, or one of another Python, must not be built upon.
    "$python" -m venv --clear "$venv"
}

install_packages() {
    local pip=("$venv/bin/python" -m pip -qq --disable-pip-version-check)
    say "installing $torch_requirement"
    # First and alone: the other packages accept any torch, and would bring the newest one.
    "${pip[@]}" install "$torch_requirement"
    say "installing the pinned packages (a few minutes)"
    # The lock is complete, so --no-deps keeps pip from adding what it leaves out on purpose.
    DS_BUILD_OPS=0 "${pip[@]}" install --no-deps -r "$root/requirements.lock"
    say "installing trl_ext (editable)"
    "${pip[@]}" install --no-deps --no-build-isolation --editable "$root"
}

venv_matches() {
    # A finished environment of the same Python can be updated in place; anything else is made anew.
    [[ -x "$venv/bin/python" && -f "$venv/.trl_ext_made" ]] || return 1
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || return 1
    [[ "$(<"$venv/.trl_ext_made")" == "$venv $(python_version "$1")" ]]
}

main() {
    [[ "$venv" == /* ]] || fail "TRL_EXT_VENV must be an absolute path; got $venv"
    [[ -f "$root/requirements.lock" ]] || fail "no requirements.lock in $root; run this from a source checkout"
    is_current && return 0
    local python
    mkdir -p "$(dirname "$venv")"
    if command -v flock >/dev/null; then
        exec 9>"$venv.lock"
        flock --nonblock 9 || { say "another setup is running; waiting for it"; flock 9; }
        is_current && return 0
    fi
    python="$(find_python "$(python_version python3)")"
    if venv_matches "$python"; then
        say "updating $venv"
    else
        say "making $venv with Python $(python_version "$python")"
        make_venv "$python"
        printf '%s\n' "$venv $(python_version "$python")" >"$venv/.trl_ext_made"
    fi
    rm -f "$stamp"
    install_packages
    fingerprint "$venv/bin/python" >"$stamp.new"
    mv "$stamp.new" "$stamp"
    say "done: $venv/bin/python"
}

main
# For callers that source this file.
export PATH="$venv/bin:$PATH"
