#!/usr/bin/env bash
# Makes the golden stores of tests/data/rocketmq-versions with the published broker of each version, and what that
# version reads back from them: golden_versions.sh [VERSION ...].  No test needs it: the archives it makes are in git.
#
# Needs Java 17, Maven and an environment (make venv).  One store takes about a minute, its jars take 90 MB in
# build/java-versions.  The ports 20909, 20911, 20912 and 20976 must be free.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source_dir="$root/tests/interop/rocketmq/versions"
data="$root/tests/data/rocketmq-versions"
build="$root/build/java-versions"
mkdir -p "$build" "$data"
echo '*' > "$build/.gitignore"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

settings_of() {
    case "$1" in
        5.3.*) echo "enableConsumeQueueExt=true enabledAppendPropCRC=true" ;;
        *) echo "" ;;
    esac
}

# The version of the modules that Maven Central does not have of 5.5.1: name server, client, tools.
others_of() {
    case "$1" in
        5.5.1) echo 5.5.0 ;;
        *) echo "$1" ;;
    esac
}

# The jars and the classes of a version; fetched once, compiled each time.
prepare() {
    local version=$1 lib="$build/$1/lib"
    [ -d "$lib" ] || {
        mvn -q -B -Dstyle.color=never "-Drocketmq.version=$version" -f "$source_dir/../pom.xml" \
            "-Dothers.version=$(others_of "$version")" dependency:copy-dependencies "-DoutputDirectory=$lib.part" \
            -DincludeScope=runtime
        mv "$lib.part" "$lib"
    }
    rm -rf "$build/$version/classes"
    mkdir "$build/$version/classes"
    find "$source_dir/src" "$source_dir/src-${version%%.*}" -name '*.java' -print0 \
        | xargs -0 javac --release 17 -Xlint:all,-processing,-classfile,-path,-serial -encoding UTF-8 \
            -cp "$lib/*" -d "$build/$version/classes"
}

# One program of a version, in a home of its own: run VERSION CLASS ARGUMENTS...
run() {
    local version=$1 class=$2
    shift 2
    mkdir -p "$scratch/home"
    # shellcheck disable=SC2046  # The settings are words.
    java "@$source_dir/../jvm.options" --add-opens=java.base/jdk.internal.ref=ALL-UNNAMED \
        "-Duser.home=$scratch/home" "-Djava.io.tmpdir=$scratch/home" \
        "-Drmq.logback.configurationFile=$source_dir/../resources/logback-stderr.xml" \
        -Drocketmq.client.logUseSlf4j=true \
        -cp "$build/$version/classes:$build/$version/lib/*" "rmqstore.versions.$class" "$@" $(settings_of "$version") \
        >"$scratch/log" 2>&1 || { cat "$scratch/log" >&2; exit 1; }
}

# A copy of a store, and what the version reads from it: read_back VERSION STORE FILE
read_back() {
    rm -rf "$scratch/copy"
    cp -a --sparse=always "$2" "$scratch/copy"
    run "$1" ReadStore "$scratch/copy" "$3"
    xz -9e --force "$3"
}

[ $# -gt 0 ] || set -- 4.9.7 5.1.4 5.3.3 5.5.1
for version in "$@"; do
    prepare "$version"
    store="$scratch/$version"
    mkdir "$store"
    run "$version" WriteStore "$store"
    # A broker's backup copies say nothing about the store.
    find "$store" -name '*.bak' -delete
    tar --sparse --sort=name --owner=0 --group=0 --format=gnu -C "$scratch" -c "$version" \
        | xz -9e > "$data/$version.tar.xz"
    read_back "$version" "$store" "$data/$version.jsonl"
    # The same after rmqstore has written to it: the version must read that, too.
    "$root/.venv/bin/python" "$root/tests/appended.py" "$store" "$version"
    read_back "$version" "$store" "$data/$version.appended.jsonl"
    du -b "$data/$version".*
done
