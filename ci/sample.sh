#!/usr/bin/env bash
# Makes the sample store that comes with the package (rmqstore/sample) with a real RocketMQ 5.5.0 broker: the messages of
# tests/data/rocketmq-broker once more, at their times and places, with bodies that can be read
# (tests/interop/rocketmq/sample).  No test needs it: what it makes is in git.
#
# Needs Java 17, Maven, a C compiler and an environment (make venv), and a machine with little else to do: it takes five
# minutes, in which the broker's clock goes slowly, so that messages have the times that they are meant to have.  The ports
# 20875 to 20877 must be free.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source_dir="$root/tests/interop/rocketmq/sample"
build="$root/build/java"
python="$root/.venv/bin/python"
# A quarter of a minute before the first message, in milliseconds; a fifth of the speed of other clocks.
clock="1795239147000 0.2"
# When the broker asks for what nobody settled, in milliseconds of a usual clock after its start.
check_interval=233000

bash "$root/ci/java.sh"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/classes" "$scratch/home" "$scratch/store"
find "$source_dir/src" -name '*.java' -print0 \
    | xargs -0 javac --release 17 -nowarn -encoding UTF-8 -cp "$build/lib/*" -d "$scratch/classes"
cc -O2 -fPIC -shared -o "$scratch/clock.so" "$source_dir/clock.c"
(cd "$scratch" && mkdir golden && tar -xf "$root/tests/data/rocketmq-broker/store.tar.xz" -C golden)
"$python" "$source_dir/messages.py" "$scratch/golden/store" > "$scratch/messages.jsonl"

SAMPLE_CLOCK="$clock" LD_PRELOAD="$scratch/clock.so" TZ=UTC \
    java "@$source_dir/../jvm.options" "-Duser.home=$scratch/home" "-Djava.io.tmpdir=$scratch/home" \
    "-Drmq.logback.configurationFile=$source_dir/../resources/logback-stderr.xml" -Drocketmq.client.logUseSlf4j=true \
    "-Dsample.checkInterval=$check_interval" -cp "$scratch/classes:$build/lib/*" rmqstore.sample.Sample \
    "$scratch/store" "$scratch/messages.jsonl" "$scratch/answers.jsonl" >"$scratch/log" 2>&1 \
    || { cat "$scratch/log" >&2; exit 1; }

# Remove what only a running broker needs (a wheel of 38 MB, an almost empty database), and copies of files.
rm -rf "$scratch/store/timerwheel" "$scratch/store/rocksdbstore"
find "$scratch/store" -name '*.bak' -delete
target="$root/rmqstore/sample"
mkdir -p "$target"
tar --sparse --sort=name --owner=0 --group=0 --format=gnu -C "$scratch" -c store | xz -9e > "$target/store.tar.xz"
# Of the orders the first 200 and every tenth after, of all else everything.
awk '!/"kind":"plain"/ || ++orders <= 200 || orders % 10 == 0' "$scratch/answers.jsonl" | xz -9e > "$target/sent.jsonl.xz"
du -b "$target"/*
