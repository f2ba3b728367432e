#!/usr/bin/env bash
# Resumable slices of `masw train`, each at most 9 minutes from start to end. The same call goes on, here or on the next machine.
#
#   scripts/gpu_train.sh --pair smollm2 --out runs/smollm2 --text SRC --answers SRC --valid SRC --valid-answers SRC ...
#
# MINUTES  of a slice (default 8: loading counts; the last step, its measure and the checkpoint must fit the ninth minute)
# LIMIT_S  seconds after which a slice is interrupted, with a checkpoint (default 520), and killed 20 s later
# SLICES   in a row (default 1); ends early when the recipe is done
# WORKERS  processes, one a GPU (default 1), under torchrun
# PYTHON   interpreter (default: that of .venv, else python3)
#
# Text that was tokenised elsewhere is named by its folder (docs/TRAINING.md). The last lines are tokens/s, loss and measure.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$here/.venv/bin/python}
[ -x "$python" ] || python=python3
launch=("$python" -m masw.cli)
if [ "${WORKERS:-1}" -gt 1 ]; then
    launch=("$python" -m torch.distributed.run --standalone --nproc-per-node "$WORKERS" -m masw.cli)
fi
report=$(mktemp)
trap 'rm -f "$report"' EXIT
for ((slice = 1; slice <= ${SLICES:-1}; slice++)); do
    code=0
    timeout --signal=INT --kill-after=20 "${LIMIT_S:-520}" "${launch[@]}" train --checkpoint-minutes 2 "$@" \
        --max-minutes "${MINUTES:-8}" >"$report" || code=$?
    cat "$report"
    case $code in
        0) grep -q '^step .*; the same command goes on$' "$report" || exit 0 ;; # else the recipe is done
        124) echo "slice $slice was stopped after ${LIMIT_S:-520} s; the next one goes on from its checkpoint" >&2 ;;
        *) exit "$code" ;;
    esac
done
