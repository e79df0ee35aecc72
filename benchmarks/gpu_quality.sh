#!/usr/bin/env bash
# A share of finetune_quality's grids on one GPU, in one command of ten minutes; call it again to go on.
#
#   MODEL=FOLDER DATA=FOLDER benchmarks/gpu_quality.sh few noisy     # grids, in this order
#
# MODEL and DATA are as in finetune_quality.py.  Several processes share the GPU, since a run of a
# small encoder on short texts fills little of it.  Stopped at BUDGET seconds, it leaves each grid's
# finished runs and tables in $OUT (or benchmarks/results) as finetune_<grid>.jsonl and .md; a grid
# goes on from the files of that name in benchmarks/results, so copy them there and commit them
# before the next call.
# Runs made on a GPU and on a CPU differ in their roundings: do not mix them in one file.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
RESULTS=${OUT:-benchmarks/results}
BUDGET=${BUDGET:-570}
PROCESSES=${PROCESSES:-8}
WORK=build/gpu_quality
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
mkdir -p "$RESULTS" "$WORK"

if nvidia-smi >/dev/null 2>&1; then
  CAPABILITY=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1)
  [ "$CAPABILITY" = 9.0 ] && CAPABILITY=9.0a
  export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$CAPABILITY}
  OMP_NUM_THREADS= JACHESS_FORCE_CUDA=1 timeout 240 "$PYTHON" setup.py build_ext --inplace \
    >"$WORK/build.txt" 2>&1 || {
    tail -n 20 "$WORK/build.txt"
    echo "gpu_quality: the build failed (above), so nothing was run"
    exit 1
  }
  "$PYTHON" -m jachess_ext doctor | tail -n 12
else
  echo "gpu_quality: no GPU was found (nvidia-smi), so the runs are made on the CPU"
fi

for grid in "$@"; do
  left=$((BUDGET - SECONDS))
  [ "$left" -ge 30 ] || break
  cp -n "benchmarks/results/finetune_$grid".{jsonl,md} "$RESULTS" 2>/dev/null
  timeout -s INT -k 10 "$left" "$PYTHON" -m benchmarks.finetune_quality --grids "$grid" \
    --model "$MODEL" --data "$DATA" --out "$WORK" --results "$RESULTS" --processes "$PROCESSES" \
    >"$WORK/$grid.txt" 2>&1 </dev/null
  echo "$grid: exit $?, $SECONDS s in all, $(wc -l <"$WORK/$grid/results.jsonl") runs"
done
