#!/bin/sh
# Prepares .venv from nothing: a pinned, editable install, and bubblewrap for the sandbox. Prints one line a stage.
#
#   scripts/setup.sh            used by every target of the Makefile; a second call takes well under a second
#
#   PYTHON=python3.12           another interpreter than python3 (3.11 or newer)
#   VENV=folder                 another place than .venv
#   MUONRL_TORCH=cpu|cuda       overrides the choice of PyTorch's build (default: cuda where nvidia-smi finds a GPU)
set -eu

cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
stamp=$venv/.muonrl-ready
unfinished=$venv/.muonrl-unfinished
log=.cache/setup.log
cpu_index=https://download.pytorch.org/whl/cpu

fail() {
    printf 'setup: error: %s\n' "$1" >&2
    exit 2
}

# stage NAME COMMAND...: run a command with its output in the log, and say how long it took. Inside a condition the shell
# does not stop at an error by itself, so the functions that run here hand a failure on.
stage() {
    name=$1
    shift
    printf 'setup: %s ... ' "$name"
    began=$(date +%s)
    if "$@" >>"$log" 2>&1; then
        printf '%s s\n' "$(($(date +%s) - began))"
    else
        printf 'failed\n'
        tail -n 15 "$log" >&2
        rm -f "$unfinished" # pip undoes what it could not finish, so the environment is still one to build on
        fail "$name failed; the whole output is in $log"
    fi
}

# ------------------------------------------------------------ what this machine is
find_python() {
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer found; install one, or name it: make setup PYTHON=/path/to/python3"
}

torch_build() {
    if [ -n "${MUONRL_TORCH:-}" ]; then
        echo "$MUONRL_TORCH"
    elif command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then
        echo cuda
    else
        echo cpu
    fi
}

# ------------------------------------------------------------ the stages
make_venv() {
    mkdir -p "$venv"
    : >"$unfinished"
    "$venv/bin/python" -m pip --version || "$python" -m venv "$venv"
}

pip_install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input "$@"
}

# Torch goes first, so that no other package pulls in a CUDA build of several GB. The CPU build has an index of its own;
# where that cannot be reached, pip's own configuration (a mirror, a folder of wheels) is asked for the same version.
install_torch() {
    pin=$(grep '^torch==' constraints.txt)
    installed=$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null) || installed=
    case "$build torch==$installed" in
        "cpu $pin+cpu" | "cuda $pin" | "cuda $pin+cu"*) return ;;
    esac
    # To pip, the other build of the same version would do.
    [ -z "$installed" ] || "$venv/bin/python" -m pip uninstall -q -y torch
    if [ "$build" = cpu ]; then
        pip_install --no-deps --timeout 10 --retries 0 --index-url "$cpu_index" "$pin" && return
        echo "the index of CPU builds did not answer; trying pip's own configuration"
    fi
    pip_install -c "$pins" "$pin"
}

# A CUDA build of torch asks for one exact triton of its own, so the pin of triton goes where torch has such a wish.
choose_pins() {
    if "$venv/bin/python" -c 'import importlib.metadata as m, sys
sys.exit(not any(need.startswith("triton") for need in m.requires("torch") or ()))'; then
        echo "torch brings its own triton"
    else
        cp constraints.txt "$pins"
    fi
}

install_project() {
    choose_pins || return
    # Build tools come from the pins as well (no isolated build), hence before the project itself.
    pip_install -c "$pins" -r "$venv/dev-requirements.txt" || return
    pip_install -c "$pins" --no-build-isolation -e '.[rl]'
}

install_bubblewrap() {
    command -v bwrap >/dev/null 2>&1 && return
    become=
    if [ "$(id -u)" != 0 ]; then become='sudo -n'; fi
    if command -v apt-get >/dev/null 2>&1 && $become true 2>/dev/null; then
        apt='apt-get update -q; DEBIAN_FRONTEND=noninteractive apt-get install -q -y bubblewrap'
        # shellcheck disable=SC2086  # $become is a command and its option, or nothing
        (stage 'bubblewrap' $become sh -c "$apt" 2>/dev/null) && return
    fi
    echo "setup: bubblewrap is missing and could not be installed; training needs it: sudo apt-get install bubblewrap" >&2
}

# ------------------------------------------------------------ run
mkdir -p .cache
if command -v flock >/dev/null 2>&1; then
    exec 9>.cache/setup.lock
    flock 9
fi

build=$(torch_build)
# The stamp holds what the environment was made from; the folder counts because a venv cannot be moved.
made_from=$(cat pyproject.toml constraints.txt scripts/setup.sh muonrl/__init__.py | cksum)" $build $(pwd)"
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$made_from" ]; then
    install_bubblewrap
    exit 0
fi

python=$(find_python)
[ -x "$venv/bin/python" ] || "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "Python's venv module is missing: sudo apt-get install python3-venv (or your distribution's name for it)"
: >"$log"
start=$(date +%s)
# A set-up that was killed left its mark behind: nothing in that folder can be trusted.
if [ -e "$unfinished" ] || { [ -e "$venv" ] && ! [ -x "$venv/bin/python" ]; }; then
    echo "setup: $venv is half made, starting over"
    rm -rf "$venv"
fi
rm -f "$stamp"

stage "environment in $venv ($("$python" --version))" make_venv
pins=$venv/constraints.txt
grep -v '^triton==' constraints.txt >"$pins"
"$venv/bin/python" -c '
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"], sep="\n")' >"$venv/dev-requirements.txt"
stage "PyTorch, $build build" install_torch
stage 'muonrl and what it needs' install_project
install_bubblewrap
rm -f "$unfinished"
printf '%s\n' "$made_from" >"$stamp"
echo "setup: ready in $(($(date +%s) - start)) s"
