#!/usr/bin/env bash
# Makes the committed results of the grids on a GPU: tunes every cell with few trials, then races
# the winners with the peers. A cell takes about 30 seconds. A run that was cut short goes on where
# it stopped, and --match and --fa4 (as in grids.py) take a part of the cells and one more peer.
#
#   benchmarks/grids.sh FOLDER [--match WORD]...       from the root of a clean checkout
#   COMMIT=...  where git can't tell it        TRIALS=14  of each cell
#   DIRECTION=backward    instead of forward
#   PART=...    in the files' names, where parts run beside each other, each on its own GPU:
#               CUDA_VISIBLE_DEVICES=1 PART=causal benchmarks/grids.sh causal --match causal
set -euo pipefail
out=${1:?folder for the results and the database}
shift
known=${COMMIT:+--commit $COMMIT --clean yes}
db=$out/winners.db
direction=${DIRECTION:-forward}
mkdir -p "$out"

# Two tuners at a time: one has the GPU, and the next one starts up and waits for it.
tune_cell() {
  grep -qxF -- "$1" "$out/tuned.txt" && return
  # shellcheck disable=SC2086
  timeout 120 python3 -m fagen tune $1 --trials "${TRIALS:-14}" --timeout 75 --db "$db" \
    </dev/null >"$out/last$$.txt" 2>&1 || { tail -3 "$out/last$$.txt"; return; }
  grep -E '^(winner|peer)' "$out/last$$.txt" | head -3 | cut -c1-120
  echo "$1" >>"$out/tuned.txt"
}
touch "$out/tuned.txt"
export out db
export -f tune_cell

for grid in G G2; do
  python3 benchmarks/grids.py --grid $grid --direction "$direction" "$@" --list |
    xargs -d '\n' -P 2 -I{} bash -c 'tune_cell "$1"' _ {}
  file=$out/h200-$direction$([ $grid = G ] || echo "-g2")${PART:+-$PART}.json
  # shellcheck disable=SC2086
  python3 benchmarks/grids.py --grid $grid --direction "$direction" "$@" --db "$db" $known \
    --out "$file" $([ -e "$file" ] && echo --append)
done
