#!/usr/bin/env bash
# On a machine with a GPU: build with CUDA, test, check memory accesses, measure; in one command of
# ten minutes.
#
#   benchmarks/gpu_run.sh            # results in $OUT, or benchmarks/results/gpu
#   QUICK=1 benchmarks/gpu_run.sh    # small shapes, to see that everything runs: about half of it
#
# Needs python3 with torch (CUDA), pybind11, ninja, pytest, pytest-benchmark and transformers, and
# nvcc; no network.
# The whole stays below BUDGET seconds: each step has a limit, and what is left of the budget is the
# limit of all. Correctness comes first: the operators, then what is made of them, then memory
# accesses, then times. Steps go on when one fails. summary.txt says of each step "ok", "FAILED", "cut"
# (its time was over; what ran until then was right, as far as it can be told) or "not run"; the exit
# status is 1 where a step failed, 3 where none failed but a test was cut or not run, else 0. After
# every step the results lie in $OUT as summary.txt and results.tar.gz: few files, there even where
# the machine stops the command.
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
UNFINISHED=0
export PYTHONUNBUFFERED=1

keep() {
  cp "$SUMMARY" "$RESULTS/summary.txt"
  tar -czf "$RESULTS/results.tar.gz.part" -C "$WORK" . && mv "$RESULTS/results.tar.gz.part" "$RESULTS/results.tar.gz"
}

# What pytest and compute-sanitizer print as soon as a test or an access is wrong.
WRONG='(FAILED|ERROR) +\[|^E  |Invalid __|========= (Error|Program hit)|ERROR SUMMARY: [1-9]| [0-9]+ failed'

# step NAME SECONDS COMMAND...: run it with a time limit, its output in NAME.txt
step() {
  local name=$1 limit=$2 left=$((BUDGET - SECONDS))
  shift 2
  [ "$limit" -le "$left" ] || limit=$left
  if [ "$limit" -lt 5 ]; then
    echo "$name: not run, the $BUDGET s are used up" | tee -a "$SUMMARY"
    UNFINISHED=1
    keep
    return 1
  fi
  local start=$SECONDS status word
  echo "== $name: $*"
  timeout -k 5 "$limit" "$@" >"$WORK/$name.txt" 2>&1 </dev/null
  status=$?
  tail -n 12 "$WORK/$name.txt"
  word=FAILED
  [ "$status" -eq 0 ] && word=ok
  if [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then
    grep -qE "$WRONG" "$WORK/$name.txt" || word=cut
  fi
  echo "$name: $word (exit $status), $((SECONDS - start)) s of $limit" | tee -a "$SUMMARY"
  [ "$word" = FAILED ] && FAILED=1
  [ "$word" = cut ] && UNFINISHED=1
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
# Only folders with tests that run on a GPU; a package that is missing fails its own file alone.
# A failure is printed when it happens, so that a step that is cut tells of it.
PYTEST=("$PYTHON" -m pytest -m "cuda and not slow" -v -p no:cacheprovider --tb=short
  --continue-on-collection-errors)
step first 40 "${PYTEST[@]}" python_tests/ops -k "same_run or hidden_nan"
step operators_right 120 "${PYTEST[@]}" --durations=5 python_tests/ops
step engine_right 80 "${PYTEST[@]}" --durations=5 python_tests/jet python_tests/models \
  python_tests/smoothness python_tests/training
step doctor 30 "$PYTHON" -m jachess_ext doctor

# Each tensor an allocation of its own, so that an access beyond its end is seen.
if command -v compute-sanitizer >/dev/null; then
  # A call takes some ten times as long: a few of each operator, in float32.
  step memcheck 90 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    compute-sanitizer --tool memcheck --error-exitcode 3 "${PYTEST[@]}" -x python_tests/ops \
    -k "${SANITIZED:-strides or same_run}"
else
  echo "memcheck: not run, compute-sanitizer was not found" | tee -a "$SUMMARY"
  UNFINISHED=1
fi

# Each script by itself, the most telling first: what the budget cuts off is at the end.
COMMON=(--device cuda --dtype "$DTYPE" --results "$WORK")
[ -n "${QUICK:-}" ] && COMMON+=(--quick)
MICRO=("$PYTHON" -m pytest benchmarks -q -p no:cacheprovider --device cuda --dtype "$DTYPE"
  --benchmark-max-time=0.1 --benchmark-columns=min,median,iqr,rounds ${QUICK:+--quick})
DERIVATIVES=("$PYTHON" -m benchmarks.derivatives "${COMMON[@]}" --parts)
micro() { step "$1" 60 "${MICRO[@]}" -k "$2" --benchmark-json "$WORK/$1.json"; }
step step_vs_plain 60 "${DERIVATIVES[@]}" step_vs_plain
micro operators test_operator
micro jvp "attention or meanflow"
micro ntk "gram or large_product"
for name in train_mode engine_vs_func; do
  step "$name" 60 "${DERIVATIVES[@]}" "$name"
done
step memory 60 "$PYTHON" -m benchmarks.memory "${COMMON[@]}"
step step_vs_published 60 "${DERIVATIVES[@]}" step_vs_published
step equal_spread 60 "$PYTHON" -m benchmarks.estimators --parts spread "${COMMON[@]}"
step profile 40 "${DERIVATIVES[@]}" profile --shapes encoder12-T128 --repeats 3
step published24 90 "${DERIVATIVES[@]}" step_vs_published --shapes encoder24-T128 --repeats 3

cat "$SUMMARY"
[ "$FAILED" -eq 0 ] || exit 1
[ "$UNFINISHED" -eq 0 ] || exit 3
