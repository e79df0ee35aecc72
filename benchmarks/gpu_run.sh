#!/usr/bin/env bash
# On a machine with a GPU: build with CUDA, test, check memory accesses, measure.
#
#   benchmarks/gpu_run.sh            # results in $OUT, or benchmarks/results/gpu
#   QUICK=1 benchmarks/gpu_run.sh    # small shapes, to see that everything runs
#
# Needs python3 with torch (CUDA), pybind11, ninja, pytest and transformers, and nvcc; no network.
# Steps go on when one fails; what failed is in summary.txt, and the exit status is then 1.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
RESULTS=${OUT:-benchmarks/results/gpu}
DTYPE=${DTYPE:-bfloat16}
mkdir -p "$RESULTS"
SUMMARY="$RESULTS/summary.txt"
: >"$SUMMARY"
FAILED=0

# step NAME SECONDS COMMAND...: run it with a time limit, its output in NAME.txt
step() {
  local name=$1 limit=$2
  shift 2
  local start=$SECONDS status
  echo "== $name: $*"
  timeout "$limit" "$@" >"$RESULTS/$name.txt" 2>&1
  status=$?
  tail -n 25 "$RESULTS/$name.txt"
  echo "$name: exit $status, $((SECONDS - start)) s" | tee -a "$SUMMARY"
  [ "$status" -eq 0 ] || FAILED=1
}

{
  echo "commit: $(git rev-parse HEAD 2>/dev/null || echo unknown)"
  echo "date: $(date -u +%Y-%m-%dT%H:%M:%SZ)"
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  nvcc --version | tail -n 2
  "$PYTHON" -c 'import torch; print("torch", torch.__version__, "cuda", torch.version.cuda)'
} >"$RESULTS/machine.txt" 2>&1
cat "$RESULTS/machine.txt"

step build 240 env JACHESS_FORCE_CUDA=1 "$PYTHON" setup.py build_ext --inplace
step doctor 60 "$PYTHON" -m jachess_ext doctor
step tests 240 "$PYTHON" -m pytest python_tests -m cuda -q -p no:cacheprovider

if command -v compute-sanitizer >/dev/null; then
  step memcheck 180 compute-sanitizer --tool memcheck --error-exitcode 3 \
    "$PYTHON" -m pytest python_tests/ops -m cuda -q -x -p no:cacheprovider \
    -k "${SANITIZED:-strides or same_run or refuses or (twin and 19)}"
else
  echo "memcheck: compute-sanitizer was not found, so nothing was checked" | tee -a "$SUMMARY"
  FAILED=1
fi

COMMON=(--device cuda --dtype "$DTYPE" --results "$RESULTS")
[ -n "${QUICK:-}" ] && COMMON+=(--quick)
step benchmarks 600 "$PYTHON" -m benchmarks.run_all "${COMMON[@]}" --only step_vs_plain \
  train_mode engine_vs_func step_vs_published memory equal_spread
step published24 300 "$PYTHON" -m benchmarks.step_vs_published "${COMMON[@]}" \
  --shapes encoder24-T128 --repeats 3
step profile 120 "$PYTHON" -m benchmarks.profile_step --device cuda --dtype "$DTYPE" \
  --shapes encoder12-T128 --repeats 3

cat "$SUMMARY"
exit "$FAILED"
