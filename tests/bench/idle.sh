#!/usr/bin/env bash
# Figures that need a machine that does nothing else. From the repository's root, with the environment of CONTRIBUTING.md:
#   tests/bench/idle.sh [trust] [start] [unet]        default: trust
#     trust   calibrate as `lbpar calibrate --config` does, then predicted beside measured steps of 140 plans (8 minutes;
#             one network takes 1 to 3: plan_quality.py --networks)
#     start   64 ranks on the cores there are, their memory, one rank of 1,024 simulated ones (1 minute)
#     unet    strong scaling of a 3-D U-Net with the planner's plan, by samples and by space (5 minutes)
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
out=$(mktemp -d)
echo "load $(cut -d' ' -f1-3 /proc/loadavg), $(getconf _NPROCESSORS_ONLN) cores, results in $out"
for part in "${@:-trust}"; do
    began=$SECONDS
    case $part in
        trust) mpirun -n 2 python tests/bench/plan_quality.py --json "$out/trust.json" ;;
        start) python tests/bench/many_ranks.py ;;
        unet)
            cat > "$out/unet.yaml" <<'RUN'
model: {name: unet3d, input: [48, 48, 48, 1], width: 0.5}
data: {train: synthetic, samples: 16}
train: {batch: 2, epochs: 1, loss: dice, optimizer: {name: adam, lr: 1.0e-3}}
run: {out: run, checkpoint: null, report: false}
RUN
            python -m lbpar.study strong --config "$out/unet.yaml" --procs 1,2,4 --plans auto,data,spatial --steps 4 --warmup 2 --out "$out/unet"
            ;;
        *) echo "unknown part: $part" >&2; exit 2 ;;
    esac
    echo "-- $part took $((SECONDS - began)) s, load $(cut -d' ' -f1-3 /proc/loadavg)"
done
