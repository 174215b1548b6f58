#!/usr/bin/env bash
# Makes the committed results of the forward grids on a GPU: tunes every cell with few trials, then
# races the winners with the peers. A cell takes about 20 seconds; a run that was cut short goes on
# where it stopped, and --match (as in forward.py) takes a part of the cells.
#
#   benchmarks/forward.sh FOLDER [--match WORD]...     from the root of a clean checkout
#   COMMIT=...  where git can't tell it        TRIALS=14  of each cell
#   PART=...    in the files' names, where parts run beside each other, each on its own GPU:
#               CUDA_VISIBLE_DEVICES=1 PART=causal benchmarks/forward.sh causal --match causal
set -euo pipefail
out=${1:?folder for the results and the database}
shift
known=${COMMIT:+--commit $COMMIT --clean yes}
db=$out/winners.db
mkdir -p "$out"

for grid in G G2; do
  python3 benchmarks/forward.py --grid $grid "$@" --list | while read -r cell; do
    grep -qxF -- "$cell" "$out/tuned.txt" 2>/dev/null && continue
    # shellcheck disable=SC2086
    timeout 60 python3 -m fagen tune $cell --trials "${TRIALS:-14}" --timeout 30 --db "$db" \
      </dev/null >"$out/last.txt" 2>&1 || { tail -3 "$out/last.txt"; continue; }
    grep -E '^(winner|peer)' "$out/last.txt" | head -3 | cut -c1-120
    echo "$cell" >>"$out/tuned.txt"
  done
  file=$out/h200-forward$([ $grid = G ] || echo "-g2")${PART:+-$PART}.json
  # shellcheck disable=SC2086
  python3 benchmarks/forward.py --grid $grid "$@" --db "$db" $known --out "$file" \
    $([ -e "$file" ] && echo --append)
done
