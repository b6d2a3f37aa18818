#!/usr/bin/env bash
# Make the real RocketMQ available to the interoperability tests: fetch the published artifacts that
# tests/interop/rocketmq/pom.xml names into build/java/lib, and compile the tools into build/java/classes.
# Does nothing if both are there and up to date. Without Java 17 or Maven it says so and succeeds, but fails if CI is true.
# RMQSTORE_ROCKETMQ=5.5.0 chooses another version than that of pom.xml.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source_dir="$root/tests/interop/rocketmq"
build="$root/build/java"

. "$root/ci/apt.sh"
give_up() { skip_tests "java.sh: $1"; }

options=(${RMQSTORE_ROCKETMQ:+"-Drocketmq.version=$RMQSTORE_ROCKETMQ"})
stamp="${RMQSTORE_ROCKETMQ:-} $(cd "$source_dir" && find pom.xml jvm.options training.jsonl src resources -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum)"
if [ -f "$build/stamp" ] && [ "$(cat "$build/stamp")" = "$stamp" ]; then
    echo "java.sh: build/java is up to date"
    exit 0
fi

command -v java >/dev/null && command -v javac >/dev/null || give_up "java and javac (17 or later) are not installed"
version="$(javac -version 2>&1 | sed -E 's/^javac ([0-9]+).*/\1/')"
[ "$version" -ge 17 ] 2>/dev/null || give_up "javac 17 or later is needed, found '$(javac -version 2>&1)'"
command -v mvn >/dev/null || give_up "Maven (mvn) is not installed"

mkdir -p "$build"
# The folder keeps itself out of git.
echo '*' > "$build/.gitignore"
rm -f "$build/stamp"

# The jars are fetched again only when pom.xml changed; compiling alone needs no network.
pom="${RMQSTORE_ROCKETMQ:-} $(sha256sum < "$source_dir/pom.xml")"
if [ ! -f "$build/pom.stamp" ] || [ "$(cat "$build/pom.stamp")" != "$pom" ]; then
    rm -rf "$build/lib" "$build/pom.stamp"
    mvn -q -B -Dstyle.color=never "${options[@]}" -f "$source_dir/pom.xml" dependency:copy-dependencies \
        -DoutputDirectory="$build/lib" -DincludeScope=runtime \
        || give_up "Maven could not fetch the RocketMQ artifacts"
    echo "$pom" > "$build/pom.stamp"
fi

rm -rf "$build/classes" "$build/classes.jsa"
mkdir -p "$build/classes"
find "$source_dir/src" -name '*.java' -print0 \
    | xargs -0 javac --release 17 -Xlint:all,-processing,-classfile,-path,-serial -encoding UTF-8 \
        -cp "$build/lib/*" -d "$build/classes"
cp -R "$source_dir/resources/." "$build/classes/"
jar --create --file "$build/tool.jar" -C "$build/classes" .

# An archive of the classes that a broker and its clients load, from one run on a store of its own. It halves the start of each of
# a hundred processes; without it everything still works.
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/store" "$scratch/home"
java "@$source_dir/jvm.options" -XX:ArchiveClassesAtExit="$build/classes.jsa" \
    -Duser.home="$scratch/home" -Djava.io.tmpdir="$scratch/home" \
    -Drmq.logback.configurationFile="$build/classes/logback-stderr.xml" \
    -cp "$build/tool.jar:$build/lib/*" rmqstore.interop.BrokerTool "$scratch/store" \
    --segment 65536 --queue 2000 --slots 100 --entries 400 \
    < "$source_dir/training.jsonl" >"$scratch/answers" 2>"$scratch/log" \
    || { cat "$scratch/log" "$scratch/answers" >&2; echo "java.sh: the broker did not run" >&2; exit 1; }

echo "$stamp" > "$build/stamp"
echo "java.sh: build/java is ready ($(find "$build/lib" -name '*.jar' | wc -l) jars)"
