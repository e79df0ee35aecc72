#!/usr/bin/env bash
# On a machine with a GPU: build with CUDA, test, check memory accesses, measure; in one command of
# ten minutes.
#
#   benchmarks/gpu_run.sh            # results in $OUT, or benchmarks/results/gpu
#   QUICK=1 benchmarks/gpu_run.sh    # small shapes, to see that everything runs: about half of it
#
# Needs python3 with torch (CUDA), pybind11, ninja, pytest and transformers, and nvcc; no network.
# The whole stays below BUDGET seconds: each step has a limit, and what is left of the budget is the
# limit of all. Steps go on when one fails; what failed is in summary.txt, and the exit status is
# then 1. After every step the results lie in $OUT as summary.txt and results.tar.gz: few files,
# there even where the machine stops the command.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
RESULTS=${OUT:-benchmarks/results/gpu}
DTYPE=${DTYPE:-bfloat16}
BUDGET=${BUDGET:-570}
WORK=build/gpu_run
rm -rf "$WORK"
mkdir -p "$RESULTS" "$WORK"
SUMMARY="$WORK/summary.txt"
: >"$SUMMARY"
FAILED=0
export PYTHONUNBUFFERED=1

keep() {
  cp "$SUMMARY" "$RESULTS/summary.txt"
  tar -czf "$RESULTS/results.tar.gz.part" -C "$WORK" . && mv "$RESULTS/results.tar.gz.part" "$RESULTS/results.tar.gz"
}

# step NAME SECONDS COMMAND...: run it with a time limit, its output in NAME.txt
step() {
  local name=$1 limit=$2 left=$((BUDGET - SECONDS))
  shift 2
  [ "$limit" -le "$left" ] || limit=$left
  if [ "$limit" -lt 5 ]; then
    echo "$name: not run, the $BUDGET s are used up" | tee -a "$SUMMARY"
    FAILED=1
    keep
    return 1
  fi
  local start=$SECONDS status
  echo "== $name: $*"
  timeout -k 5 "$limit" "$@" >"$WORK/$name.txt" 2>&1 </dev/null
  status=$?
  tail -n 12 "$WORK/$name.txt"
  echo "$name: exit $status, $((SECONDS - start)) s of $limit" | tee -a "$SUMMARY"
  [ "$status" -eq 0 ] || FAILED=1
  keep
  return "$status"
}

{
  echo "commit: $(git rev-parse HEAD 2>/dev/null || echo unknown)"
  echo "date: $(date -u +%Y-%m-%dT%H:%M:%SZ)"
  nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap --format=csv,noheader
  nvcc --version | tail -n 2
  "$PYTHON" -c 'import torch; print("torch", torch.__version__, "cuda", torch.version.cuda)'
} >"$WORK/machine.txt" 2>&1
cat "$WORK/machine.txt"

# This GPU's own architecture alone: a third of the compile time. Hopper's with its own instructions.
CAPABILITY=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1)
[ "$CAPABILITY" = 9.0 ] && CAPABILITY=9.0a
export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$CAPABILITY}

step build 200 env JACHESS_FORCE_CUDA=1 "$PYTHON" setup.py build_ext --inplace
if [ "$?" -ne 0 ]; then
  echo "Without a build there is nothing to run: see build.txt." | tee -a "$SUMMARY"
  keep
  exit 1
fi
step doctor 40 "$PYTHON" -m jachess_ext doctor
# Only folders with tests that run on a GPU; a package that is missing fails its own file alone.
TESTS=(python_tests/ops python_tests/models python_tests/jet python_tests/smoothness
  python_tests/training)
PYTEST=("$PYTHON" -m pytest -m "cuda and not slow" -q -p no:cacheprovider --tb=short
  --continue-on-collection-errors)
step tests 150 "${PYTEST[@]}" --durations=5 "${TESTS[@]}"

# Each tensor an allocation of its own, so that an access beyond its end is seen.
if command -v compute-sanitizer >/dev/null; then
  step memcheck 90 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    compute-sanitizer --tool memcheck --error-exitcode 3 "${PYTEST[@]}" -x python_tests/ops \
    -k "${SANITIZED:-strides or same_run or threads or (twin and dtype1)}"
else
  echo "memcheck: compute-sanitizer was not found, so nothing was checked" | tee -a "$SUMMARY"
  FAILED=1
fi

# Each script by itself, the most telling first: what the budget cuts off is at the end.
COMMON=(--device cuda --dtype "$DTYPE" --results "$WORK")
[ -n "${QUICK:-}" ] && COMMON+=(--quick)
for name in step_vs_plain operators attention_operator ntk_gram train_mode engine_vs_func memory \
  step_vs_published equal_spread; do
  [ -f "benchmarks/$name.py" ] && step "$name" 60 "$PYTHON" -m "benchmarks.$name" "${COMMON[@]}"
done
step profile 40 "$PYTHON" -m benchmarks.profile_step --device cuda --dtype "$DTYPE" \
  --shapes encoder12-T128 --repeats 3
step published24 90 "$PYTHON" -m benchmarks.step_vs_published "${COMMON[@]}" \
  --shapes encoder24-T128 --repeats 3

cat "$SUMMARY"
exit "$FAILED"
