#!/usr/bin/env bash
# Everything that is measured on a GPU, within 9 minutes, one table last: the tests that need CUDA, then single passes of Llama-3 shapes
# with random weights (draft steps of masw, full and window; the target's verify pass), bytes and FLOPs floor beside the measured time;
# each the ordinary way and through static shapes replayed as a CUDA graph.
#
#   scripts/gpu_bench.sh                                    # on a GPU
#   SHAPES="tiny-2 tiny-4" CONTEXTS=64,256 BATCH=1,2 scripts/gpu_bench.sh --window 32    # the same script on a CPU, as the tests run it
#
# SHAPES    (default "llama-3.2-3b llama-3.1-8b")       CONTEXTS  (default 2k,8k,32k,128k)      BATCH (default 1,16)
# REPEATS   samples of each row (default 8)             OUT       folder of steps.jsonl, steps.csv (default runs/gpu-bench)
# TESTS_S   seconds for the tests (default 120)         LIMIT_S   seconds in all (default 530): rows done by then are kept and shown
# GRAPHS    0: the ordinary way only (default 1)        PYTHON    interpreter (default: that of .venv, else python3)
# Further arguments go to `masw bench --steps-only`. What cannot fit the device's memory becomes a row with its estimate.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$here/.venv/bin/python}
[ -x "$python" ] || python=python3
read -ra names <<<"${SHAPES:-llama-3.2-3b llama-3.1-8b}"
shapes=()
for name in "${names[@]}"; do shapes+=(--shape "$name"); done
graphs=(--graphs)
[ "${GRAPHS:-1}" != 0 ] || graphs=()
tests="no CUDA here: its tests were not run"
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    tests="CUDA tests passed"
    (cd "$here" && timeout --kill-after=5 "${TESTS_S:-120}" "$python" -m pytest -q tests/test_cuda.py) >&2 || tests="CUDA TESTS FAILED (exit $?)"
fi
# No row begins in the last 30 seconds, so that the one that runs then can end; past the limit the whole is interrupted, then killed.
left=$((${LIMIT_S:-530} - SECONDS))
limit=$((left > 31 ? left - 30 : 1))
guard=$((left > 90 ? left : 90)) # starting alone takes a while
code=0
PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" timeout --signal=INT --kill-after=8 "$guard" \
    "$python" -m masw.cli bench --steps-only --random-weights "${shapes[@]}" --contexts "${CONTEXTS:-2k,8k,32k,128k}" --batch "${BATCH:-1,16}" \
    --stride 8 --repeats "${REPEATS:-8}" --out "${OUT:-runs/gpu-bench}" --skip-too-large --limit-s "$limit" "${graphs[@]}" "$@" || code=$?
echo "$tests; $SECONDS s"
if [ "$code" -eq 124 ]; then
    echo "stopped after ${LIMIT_S:-530} s; the rows above are kept" >&2
    code=0
fi
[[ $tests != *FAILED* ]] || exit 3
exit "$code"
