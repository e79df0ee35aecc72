#!/usr/bin/env bash
# On a machine with a GPU, in commands of at most ten minutes each, without a network:
#
#   benchmarks/gpu_run.sh short                 # what is open, the most telling first: 400 s
#   BUDGET=285 benchmarks/gpu_run.sh tests      # does the library load; operators right; races
#   BUDGET=365 benchmarks/gpu_run.sh figures    # how fast
#   (so that the last two fit a quarter of an hour; without BUDGET, 570 s each)
#   DRY_RUN=1 …                      # goes on without a GPU: tests are skipped, figures are a CPU's
#   QUICK=1 …                        # small shapes, to see that everything runs: about half of it
#
# Rows have the commit of the checkout, or where what travelled has no history, of $JACHESS_COMMIT or
# the bundle. Of build/peers, wheels of programs that `short` times beside ours:
#   pip download jvp_flash_attention==0.14.0 --no-deps -d build/peers
#
# Results are in $OUT, or benchmarks/results/gpu. Needs python3 with torch (CUDA), numpy, pytest,
# pytest-benchmark, hypothesis and transformers. `make gpu-bundle` makes a folder with all else,
# a library built beforehand. Only where a library refuses to load is one built (pybind11, ninja,
# nvcc, some minutes).
# Each command stays below BUDGET seconds: each step has a limit, and what is left of the budget is
# the limit of all. Steps go on when one fails. summary.txt says of each step "ok", "FAILED", "cut"
# (its time was over; what ran until then was right, as far as it can be told) or "not run"; the exit
# status is 1 where a step failed, 3 where none failed but a test was cut or not run, else 0. After
# every step the results lie in $OUT as summary-COMMAND.txt and results-COMMAND.tar.gz: few files,
# there even where the machine stops the command.
set -uo pipefail
cd "$(dirname "$0")/.."

COMMAND=${1:-}
if [ "$COMMAND" != short ] && [ "$COMMAND" != tests ] && [ "$COMMAND" != figures ]; then
  echo "gpu_run: the argument is '$COMMAND'; expected short, tests or figures" >&2
  exit 2
fi
PYTHON=${PYTHON:-python3}
RESULTS=${OUT:-benchmarks/results/gpu}
DTYPE=${DTYPE:-bfloat16}
DEVICE=${DRY_RUN:+cpu}
DEVICE=${DEVICE:-cuda}
[ "$COMMAND" = short ] && BUDGET=${BUDGET:-400}
BUDGET=${BUDGET:-570}
export JACHESS_COMMIT=${JACHESS_COMMIT:-$(cat COMMIT 2>/dev/null)}
WORK=build/gpu_run/$COMMAND
rm -rf "$WORK"
mkdir -p "$RESULTS" "$WORK"
SUMMARY="$WORK/summary.txt"
: >"$SUMMARY"
FAILED=0
UNFINISHED=0
# Eight processes run side by side: a thread for each core in each would be too many.
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2

keep() {
  local packed="$RESULTS/results-$COMMAND.tar.gz"
  cp "$SUMMARY" "$RESULTS/summary-$COMMAND.txt"
  tar -czf "$packed.part" -C "$WORK" . && mv "$packed.part" "$packed"
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
  echo "commit: $(git rev-parse HEAD 2>/dev/null || echo "${JACHESS_COMMIT:-unknown}")"
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

# A library that loads makes a build, and its minutes, unnecessary; a doctor that was cut says
# nothing about the library.
step doctor 120 "$PYTHON" -c 'from jachess_ext.ops import library as l
assert l.STATE.problem is None, l.STATE.problem
assert ("attention_jet", "'"$DEVICE"'") in l.STATE.kernels, "the library has no CUDA kernels"'
if [ $? -eq 1 ]; then
  FAILED=0
  if ! step build 200 env JACHESS_FORCE_CUDA=1 "$PYTHON" setup.py build_ext --inplace; then
    echo "Without a library there is nothing to run: see build.txt." | tee -a "$SUMMARY"
    keep
    exit 1
  fi
fi

finish() {
  cat "$SUMMARY"
  [ "$FAILED" -eq 0 ] || exit 1
  [ "$UNFINISHED" -eq 0 ] || exit 3
  exit 0
}

# Without a GPU every test would be skipped, and all be "ok".
if [ -z "${DRY_RUN:-}" ] && ! step gpu 60 "$PYTHON" -c \
  'import torch; assert torch.cuda.is_available(), "torch sees no GPU"'; then
  finish
fi

# A failure is printed when it happens, so that a step that is cut tells of it. After one fault of
# the GPU every test of a process fails: ten are enough, and their tracebacks are printed.
PYTEST=("$PYTHON" -m pytest -m "cuda and not slow" -v -p no:cacheprovider --tb=short --maxfail=10)

# Runs each file's tests in a process of its own, eight at a time; a file without any is right. One
# that fails is run again with every launch waited for, so that the traceback names the launch.
in_processes() {
  printf '%s\n' "$@" | xargs -P 8 -I FILE sh -c '"$@" FILE; s=$?
    [ "$s" -eq 0 ] || [ "$s" -eq 5 ] || { CUDA_LAUNCH_BLOCKING=1 "$@" -x FILE; exit "$s"; }' \
    sh "${PYTEST[@]}" ${KEYWORDS:+-k "$KEYWORDS"}
}
export -f in_processes

# files NAME SECONDS FILE...: a step of these files of tests, or of those that $KEYWORDS chooses.
files() {
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" bash -c "$(declare -p PYTEST); in_processes \"\$@\"" bash "$@"
}

# For the sanitizers: 16 bits, which take the asynchronous copies, both numbers of streams; and two
# warps that share 16 rows, by named barriers of their own.
KERNELS="[float16-4-64-causal or bfloat16-2-128-padded or bfloat16-4-128-causal"
SANITIZED=${SANITIZED:-heads_of_models and ($KERNELS)}

# sanitize TOOL SECONDS EXPRESSION: attention's tests of that expression. Each tensor is an allocation
# of its own, so that an access beyond its end is seen; torch's kernels, which the references run, are
# left out.
sanitize() {
  if ! command -v compute-sanitizer >/dev/null; then
    echo "$1: not run, compute-sanitizer was not found" | tee -a "$SUMMARY"
    UNFINISHED=1
    return
  fi
  step "$1" "$2" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    compute-sanitizer --tool "$1" --kernel-regex kns=jachess --error-exitcode 3 \
    "${PYTEST[@]}" -x "${ATTENTION[@]}" -k "$3"
}
ATTENTION=(python_tests/ops/test_attention*.py)
PRODUCTS="gram or large_product"

# Each script by itself, the most telling first: what the budget cuts off is at the end.
ON=(--device "$DEVICE" --results "$WORK" ${QUICK:+--quick})
COMMON=("${ON[@]}" --dtype "$DTYPE")
MICRO=("$PYTHON" -m pytest benchmarks -q -p no:cacheprovider --device "$DEVICE" --dtype "$DTYPE"
  --benchmark-max-time=0.1 --benchmark-columns=min,median,iqr,rounds ${QUICK:+--quick})
DERIVATIVES=("$PYTHON" -m benchmarks.derivatives)
micro() { step "$1" "$3" "${MICRO[@]}" -k "$2" --benchmark-json "$WORK/$1.json"; }

if [ "$COMMAND" = short ]; then
  # The first time that a GPU runs Triton's kernels.
  KEYWORDS="on_a_gpu and (plain or once)" files triton 70 python_tests/triton/test_attention.py
  export JACHESS_TRITON=1
  NEW="heads_of_models and bfloat16-4-128"
  KEYWORDS="$NEW or hybrid or scores" files new 20 "${ATTENTION[@]}"
  sanitize racecheck 25 "$NEW-causal or hybrid or scores"
  files operators 30 "${ATTENTION[@]}" python_tests/ops/test_{jet_mean_squares,ntk}.py
  TOKENS=(2048 4096)
  SHAPES=(--shapes encoder6-T32 encoder6-T128)
  CASES=(--cases mlp-D10-N256 transformer-D8-N32 mlp-D50-N64 transformer-D32-N32)
  SIZES=(--samples 32 --tokens 32 64)
  [ -n "${QUICK:-}" ] && TOKENS=(128) SHAPES=() CASES=() SIZES=()
  step attention 50 "$PYTHON" -m benchmarks.attention_gpu --dtype "$DTYPE" --results "$WORK" \
    --tokens "${TOKENS[@]}" ${DRY_RUN:+--dry-run}
  step pieces 15 "$PYTHON" -m benchmarks.attention_gpu --dtype "$DTYPE" --results "$WORK" \
    --parts ${DRY_RUN:+--dry-run}
  if command -v ncu >/dev/null; then
    step ncu 20 ncu --kernel-name-base demangled --kernel-name regex:jachess --launch-count 3 \
      --section SpeedOfLight --section Occupancy --section WarpStateStats "$PYTHON" -c '
import torch
from jachess_ext import ops
x = torch.randn(3, 4, 2, 16, 2048, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
ops.attention_jet(*x, q=2).sum().backward()'
  else
    echo "ncu: not run, it was not found" | tee -a "$SUMMARY"
    UNFINISHED=1
  fi
  for wheel in build/peers/*.whl; do
    [ -e "$wheel" ] && "$PYTHON" -m zipfile -e "$wheel" "$WORK/peers"
  done
  # flow-pi's shape, which has a mask, is its first.
  step peers 65 env PYTHONPATH="$WORK/peers" "$PYTHON" -m benchmarks.peers "${COMMON[@]}"
  # torch.func.jvp of layer norm gives float32 tangents in 16 bits.
  step meanflow 15 "${DERIVATIVES[@]}" "${ON[@]}" --parts meanflow --repeats 5
  step steps 20 "${DERIVATIVES[@]}" "${COMMON[@]}" --parts step_vs_plain "${SHAPES[@]}" --repeats 5
  step graphed 15 "${DERIVATIVES[@]}" "${COMMON[@]}" --parts graphed --repeats 5
  step laplacian 20 "$PYTHON" -m benchmarks.laplacian "${ON[@]}" --ways "double backward" \
    "${CASES[@]}" --repeats 3
  step kernel 15 "$PYTHON" -m benchmarks.ntk "${ON[@]}" --parts time "${SIZES[@]}" \
    --methods jacobian vmap-grad --repeats 3
  micro gram "$PRODUCTS" 20
  finish
fi

if [ "$COMMAND" = tests ]; then
  files first 100 python_tests/ops/test_attention.py
  # By name: to collect whole folders takes longer than to run the tests.
  files operators 150 \
    python_tests/ops/test_{activation,directions,jet_mean_squares,norm,ntk,softmax}.py \
    python_tests/ops/test_{transforms,large_offsets}.py \
    python_tests/{jet,models,smoothness}/test_devices.py
  sanitize racecheck 100 "$SANITIZED"
  sanitize memcheck 100 "$SANITIZED"
  finish
fi

step attention 90 "$PYTHON" -m benchmarks.attention_gpu --dtype "$DTYPE" --results "$WORK" \
  ${QUICK:+--tokens 128}
step step_vs_plain 150 "${DERIVATIVES[@]}" "${COMMON[@]}" --parts step_vs_plain
micro operators test_operator 60
step attention_jvp 60 "${DERIVATIVES[@]}" "${COMMON[@]}" --parts attention_jvp
micro ntk "$PRODUCTS" 60
step train_mode 60 "${DERIVATIVES[@]}" "${COMMON[@]}" --parts train_mode
# torch.func.jvp of layer norm gives float32 tangents in 16 bits.
step engine_vs_func 60 "${DERIVATIVES[@]}" "${ON[@]}" --parts engine_vs_func meanflow
step memory 60 "$PYTHON" -m benchmarks.memory "${COMMON[@]}"
step step_vs_published 60 "${DERIVATIVES[@]}" "${COMMON[@]}" --parts step_vs_published
step equal_spread 60 "$PYTHON" -m benchmarks.estimators --parts spread "${COMMON[@]}"
step profile 40 "${DERIVATIVES[@]}" "${COMMON[@]}" --parts profile \
  --shapes encoder12-T128 --repeats 3
step published24 90 "${DERIVATIVES[@]}" "${COMMON[@]}" --parts step_vs_published \
  --shapes encoder24-T128 --repeats 3

finish
