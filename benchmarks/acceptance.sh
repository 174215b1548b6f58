#!/usr/bin/env bash
# Makes the committed results of bf16 D128 N8192 on a GPU: full and causal, two seeds each, every
# run with empty caches and a database of its own; then what fagen.get serves of them, in a new
# process, through the gate and raced. About 8 minutes on one H200 with 16 cores; MASKS=full and
# MASKS=causal make one half each.
#
#   benchmarks/acceptance.sh FOLDER [COMMIT]     from the root of a clean checkout; COMMIT where
#                                                git can't tell it
set -euo pipefail
out=${1:?folder for the results}
known=${2:+--commit $2 --clean yes}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"

for mask in ${MASKS:-full causal}; do
  flag=$([ "$mask" = causal ] && echo " --causal" || true)
  stem=h200_bf16_b1h16_n8192_d128_$mask
  for seed in 0 1; do
    words="tune --seq 8192 --head-dim 128$flag --seed $seed --trials 128"
    db=$work/${mask}_seed$seed.db
    started=$(date +%s)
    # shellcheck disable=SC2086
    FAGEN_CACHE=$work/cache$mask$seed TRITON_CACHE_DIR=$work/triton$mask$seed \
      timeout 180 python3 -m fagen $words --db "$db"
    seconds=$(($(date +%s) - started))
    echo "fagen $words: $seconds s from a cold start"
    cp "$db" "$out/${mask}_seed$seed.db"
    # shellcheck disable=SC2086
    python3 benchmarks/publish.py --db "$db" --run 1 $known --command "fagen $words" \
      --cold-start-s "$seconds" --out "$out/${stem}_seed$seed.json"
  done
  # shellcheck disable=SC2086
  FAGEN_CACHE=$work/served TRITON_CACHE_DIR=$work/served/triton \
    python3 benchmarks/served.py --seq 8192 --head-dim 128$flag $known \
    "$work/${mask}_seed0.db" "$work/${mask}_seed1.db" --out "$out/${stem}_served.json"
done
