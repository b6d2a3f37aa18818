"""The scripts of continuous integration.

Covers what a command meets under ci/clean.sh, that every step of ci/steps.sh counts, that each test `make test` leaves out runs
elsewhere, and that a missing interpreter fails where CI is true.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import yaml
from long_tests import LONG, NIGHTLY, SWEEPS
from scratch import folder_for_everybody

ROOT = Path(__file__).resolve().parents[2]
# Prints what a command finds, as JSON, by the interpreter on the clean PATH.
LOOK = (
    "import json, os, stat, sys; "
    "mode = lambda path: stat.S_IMODE(os.stat(path).st_mode); "
    "open('build-ci-note', 'w').close(); "
    "print(json.dumps({'environment': dict(os.environ), 'user': os.geteuid(), 'umask': mode('build-ci-note'), "
    "'home': [mode(os.environ['HOME']), os.listdir(os.environ['HOME'])], "
    "'temporary': [mode(os.environ['TMPDIR']), os.listdir(os.environ['TMPDIR'])], "
    "'stdin': sys.stdin.read(), 'folder': os.getcwd(), 'files': sorted(os.listdir('.'))}))"
)


@pytest.fixture
def clean():
    """Return a function `clean(*command, **variables)` that runs a command under ci/clean.sh and returns the finished process."""
    if subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("this is no checkout")

    def run(*command, **variables):
        return subprocess.run(
            ["bash", "ci/clean.sh", *command],
            cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip

    return run


def test_a_clean_run_has_few_variables_and_no_rights(clean):
    ran = clean("python3", "-c", LOOK, PYTHONUNBUFFERED="1", LANG="de_DE.UTF-8", PIP_CACHE_DIR="/here", PIP_RETRIES="7")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    names = set(found["environment"]) - {"LC_CTYPE", "PWD", "OLDPWD", "SHLVL", "_"}
    assert {"PATH", "HOME", "TMPDIR", "PIP_RETRIES"} <= names
    refused = ("PYTHON", "LANG", "LC_", "PYENV", "RMQSTORE", "PIP_CACHE_DIR")
    assert not [name for name in names if name.startswith(refused)]
    assert found["user"] != 0 and found["umask"] == 0o600
    assert found["home"] == [0o700, []] and found["temporary"] == [0o700, []] and found["stdin"] == ""
    # Nothing that was built or installed by hand, and nothing stays.
    assert ".venv" not in found["files"] and "build" not in found["files"] and "setup.py" in found["files"]
    assert found["folder"] != str(ROOT) and not os.path.exists(found["folder"])


def test_a_test_that_needs_a_variable_fails_in_a_clean_run(clean):
    # As the ones did that passed only where PYTHONUNBUFFERED was set.
    command = ("python3", "-c", "import os; assert os.environ.get('PYTHONUNBUFFERED')")
    assert subprocess.run(command, env={**os.environ, "PYTHONUNBUFFERED": "1"}, check=False).returncode == 0
    ran = clean(*command, PYTHONUNBUFFERED="1")
    assert ran.returncode == 1 and "AssertionError" in ran.stderr


def test_the_exit_code_and_the_logs_come_back_and_left_files_are_named(clean, tmp_path):
    name = f"test-{tmp_path.name}-{os.getpid()}.log"
    command = f"mkdir -p build/ci && echo told > build/ci/{name} && touch $TMPDIR/left && exit 7"
    ran = clean("bash", "-c", command)
    log = ROOT / "build" / "ci" / name
    try:
        assert ran.returncode == 7 and log.read_text() == "told\n"
        assert "left in the temporary folder" in ran.stdout and "/left" in ran.stdout
    finally:
        log.unlink(missing_ok=True)


def test_what_make_test_leaves_out_exists():
    for name in (*LONG, *NIGHTLY, *SWEEPS):
        path, _, begin = name.partition("::")
        assert (ROOT / "tests" / path).exists(), name
        if begin:
            assert f"def {begin.partition('[')[0]}" in (ROOT / "tests" / path).read_text(encoding="utf-8"), name
    for name in NIGHTLY:
        assert name.startswith(LONG), f"{name} is not in LONG"
    for name in SWEEPS:
        assert not name.startswith(LONG), f"{name} is in LONG too"


@pytest.fixture
def steps(tmp_path):
    """Return a function that runs ci/steps.sh with stubs for its programs, and returns the finished process.

    `steps(closing, fails=())`: `make test…` prints `closing`, every other stub its name and arguments; scripts and targets of make
    in `fails` exit with 1.
    """
    (tmp_path / "ci").mkdir()
    (tmp_path / "bin").mkdir()
    script = (ROOT / "ci" / "steps.sh").read_text(encoding="utf-8")
    shutil.copy(ROOT / "ci" / "steps.sh", tmp_path / "ci")

    def run(closing, fails=()):
        (tmp_path / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / "build").mkdir(exist_ok=True)
        stub = "#!/bin/sh\nsaid=\"$(basename $0 .sh) $*\"\ncase $1 in test*) said='{}' ;; esac\necho \"$said\"\n"
        stub += "case ' {} ' in *\" $(basename $0) \"*|*\" $1 \"*) exit 1 ;; esac\n"
        for program in [*(tmp_path / path for path in re.findall(r"bash (ci/\w+\.sh)", script)), tmp_path / "bin" / "make"]:
            program.write_text(stub.format(closing, " ".join(fails) or "none"), encoding="utf-8")
            program.chmod(0o755)
        return subprocess.run(
            ["bash", "ci/steps.sh"], cwd=tmp_path, env={**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip

    return run


def test_steps_that_all_pass_pass(steps):
    ran = steps("==== 41 passed, 2 skipped in 1.00s ====")
    assert ran.returncode == 0 and ran.stderr == ""
    assert ran.stdout.splitlines()[-1] == "164 passed, 0 failed", ran.stdout


@pytest.mark.parametrize("failing", ["test", "checks.sh", "sanitize", "pythons.sh", "demo"])
def test_a_step_that_fails_fails_the_run(steps, failing):
    closing = "==== 3 failed, 38 passed, 1 error in 1.00s ====" if failing == "test" else "==== 41 passed in 1.00s ===="
    ran = steps(closing, fails=[failing])
    assert ran.returncode == 1
    # Without a failed test a failed step counts as one.
    expected = {"test": "152 passed, 16 failed", "demo": "0 passed, 1 failed"}
    assert ran.stdout.splitlines()[-1] == expected.get(failing, "164 passed, 1 failed"), ran.stdout
    # Most systems cut a long output in its middle: the end of a failed step's output is repeated before the table.
    said = {"checks.sh": "checks", "sanitize": "make sanitize", "demo": "make demo", "pythons.sh": "pythons 3.15"}
    reasons = re.findall(r"^=== \S+ failed; its last lines:\n(.*)$", ran.stdout, re.MULTILINE)
    assert reasons and reasons[0].startswith(said.get(failing, closing))
    assert ran.stdout.index(" failed; its last lines:") < ran.stdout.index("=== steps")


def test_every_step_runs_whatever_the_time_and_the_commit(steps):
    script = (ROOT / "ci" / "steps.sh").read_text(encoding="utf-8")
    named = re.findall(r"^step (\S+)", script, re.MULTILINE)
    assert re.findall(r"^=== (\w+): ", steps("==== 1 passed in 1.00s ====").stdout, re.MULTILINE) == named
    assert {"demo", "setup", "test", "rest", "interop", "checks", "sanitize", "newest", "fuzz", "simulate"} <= set(named)
    assert "rev-list" not in script and "date" not in script


# ---------------------------------------------------------------------------------------------------------------
# Other environments


def test_the_oldest_and_the_newest_python_of_the_package_are_tested():
    script = (ROOT / "ci" / "pythons.sh").read_text(encoding="utf-8")
    versions = re.search(r"^VERSIONS=\((.*)\)$", script, re.MULTILINE)[1].split()
    classified = re.findall(r"Python :: (3\.\d+)\"", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert versions == [version for version in classified if version != "3.11"]
    steps = (ROOT / "ci" / "steps.sh").read_text(encoding="utf-8")
    prepared = (ROOT / "ci" / "system.sh").read_text(encoding="utf-8")
    assert f"ci/pythons.sh {classified[-1]}\n" in steps and f"ci/pythons.sh --prepare {classified[-1]}\n" in prepared
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    assert f"ci/pythons.sh --lowest {classified[0]}\n" in workflow


@pytest.fixture
def without_sudo():
    """Tests of what a user without rights meets: root becomes one, and nobody else may be root by sudo."""
    if os.geteuid() and not subprocess.run(["sh", "-c", "sudo -n true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may be root by sudo")


@pytest.mark.parametrize(
    "command, said",
    [
        (("bash", "ci/pythons.sh", "3.99"), "there is no Python 3.99 here"),
    ],
    ids=["pythons"],
)
def test_an_environment_that_is_not_there_fails_in_continuous_integration_only(clean, without_sudo, command, said):
    for ci, code in (("true", 1), ("", 0)):
        ran = clean(*command, CI=ci)
        assert ran.returncode == code, ran.stderr
        assert said in ran.stdout + ran.stderr


@pytest.fixture
def folder_of_a_system():
    """A folder for ci/debian.sh that shows this system's own programs, where every user can reach it."""
    with tempfile.TemporaryDirectory(dir=folder_for_everybody()) as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "tmp").mkdir(mode=0o755)
        for link in [Path("/bin"), Path("/sbin"), *Path("/").glob("lib*")]:
            (folder / link.name).symlink_to(os.readlink(link) if link.is_symlink() else link)
        for shown in ("usr", "etc"):
            (folder / shown).symlink_to(f"/{shown}")
        yield folder


def test_a_command_in_a_debian_is_of_the_user_who_called_and_leaves_no_mount(clean, folder_of_a_system):
    look = 'id -u; pwd; echo "$HOME"; touch "$HOME/a" "$TMPDIR/b" build-ci-note; rm "$TMPDIR/b"; cat </dev/null; exit 7'
    program = f"id -u; pwd; bash ci/debian.sh run {folder_of_a_system} bash -c '{look}'; echo code $?; stat -c %u build-ci-note"
    ran = clean("bash", "-c", program)
    if "no user namespace" in ran.stderr:
        pytest.skip("the system gives this user no user namespace")
    user, here, *inside, code, owner = ran.stdout.splitlines()[1:]
    assert inside == [user, here, "/suite"], ran.stderr
    assert code == "code 7" and owner == user != "0"
    assert str(folder_of_a_system) not in Path("/proc/self/mounts").read_text()
    assert os.listdir(folder_of_a_system / "tmp") == []


# ---------------------------------------------------------------------------------------------------------------
# The nightly workflow


def test_a_night_has_a_day_of_simulation_and_a_day_of_fuzzing():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text(encoding="utf-8"))["jobs"]
    fuzz, simulate = jobs["fuzz"], jobs["simulate"]
    (command,) = (each["run"] for each in simulate["steps"] if each.get("run", "").startswith("make "))
    assert "simulate-long" in command
    minutes, processes = (int(re.search(rf"{name}=(\d+)", command)[1]) for name in ("SIMULATE_MINUTES", "JOBS"))
    assert minutes < simulate["timeout-minutes"] and minutes * processes >= 22 * 60
    (step,) = (each for each in fuzz["steps"] if each.get("run", "").startswith("make "))
    parts = fuzz["strategy"]["matrix"]["part"]
    assert step["env"]["PART"].endswith(f"/{len(parts)}") and parts == list(range(1, len(parts) + 1))
    minutes = int(re.search(r"make fuzz-long .*FUZZ_MINUTES=(\d+)", step["run"])[1])
    assert minutes < fuzz["timeout-minutes"] and minutes * len(parts) >= 22 * 60


def test_what_continuous_integration_leaves_out_runs_every_night():
    text = (ROOT / ".github" / "workflows" / "nightly.yml").read_text(encoding="utf-8")
    wanted = ("debug-test", "test-portable", "sanitize-rest", "sanitize-threads", "instructions", "soak", "bench")
    assert [target for target in wanted if f"make {target}" not in text] == []
    assert "RMQSTORE_ROCKETMQ: 5.5.0" in text and "ubuntu-24.04-arm" in text and "ci/pythons.sh 3.14t" in text


@pytest.fixture
def fuzz(tmp_path):
    """A function `fuzz(*arguments, **variables)`: ci/fuzz.sh with an interpreter that only says what it was to fuzz."""
    (tmp_path / "ci").mkdir()
    shutil.copy(ROOT / "ci" / "fuzz.sh", tmp_path / "ci")
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        'case $1 in */tests/fuzz/*) ;; *) exit 0 ;; esac\n'
        'name=$(basename "$1" .py)\n'
        'case $2 in -*) ;; *) name=$name:$2 ;; esac\n'
        f'echo "$name" >> {tmp_path}/done\n'
        '[ "$name" != "$FAILING" ]\n',
        encoding="utf-8",
    )
    python.chmod(0o755)
    (tmp_path / "build" / "fuzz" / "lib").mkdir(parents=True)

    def run(*arguments, **variables):
        (tmp_path / "done").unlink(missing_ok=True)
        ran = subprocess.run(
            ["bash", "ci/fuzz.sh", *arguments], cwd=tmp_path, env={**os.environ, "PYTHON": str(python), **variables},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        done = tmp_path / "done"
        return ran, done.read_text(encoding="utf-8").split() if done.exists() else []

    return run


def test_the_parts_of_the_fuzzer_are_all_of_it_and_each_is_in_one(fuzz):
    ran, every = fuzz("1")
    assert ran.returncode == 0 and len(every) == len(set(every)) >= 20
    parts = [fuzz("1", PART=f"{number}/4")[1] for number in (1, 2, 3, 4)]
    assert sorted(name for part in parts for name in part) == sorted(every)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert fuzz("1", TARGET="import", PART="2/2")[1] == [name for name in every if "import" in name][1::2]
    ran, none = fuzz("1", TARGET="nothing of this name")
    assert ran.returncode == 2 and none == [] and "there is no target" in ran.stderr


def test_a_finding_of_the_fuzzer_stops_no_other_target(fuzz):
    every = fuzz("1")[1]
    ran, done = fuzz("1", FAILING=every[3])
    assert ran.returncode == 1 and done == every and f"found something with {every[3]}" in ran.stderr


def test_a_long_run_of_the_fuzzer_ends_when_its_time_is_up(fuzz):
    ran, done = fuzz("long", "1", MINUTES="0")
    assert ran.returncode == 0 and done == []


@pytest.mark.parametrize("ceiling, code, left", [(0, 1, 0), (1, 0, 1), (9, 0, 1)])
def test_the_ceiling_of_the_prose_check_only_falls(tmp_path, ceiling, code, left):
    (tmp_path / "ci").mkdir()
    script = re.sub(r"(?m)^CEILING = \d+$", f"CEILING = {ceiling}", (ROOT / "ci" / "prose.py").read_text(encoding="utf-8"))
    (tmp_path / "ci" / "prose.py").write_text(script, encoding="utf-8")
    phrase = "W" + "hat is here counts."
    (tmp_path / "page.md").write_text(f"{phrase}\n```\n{phrase}\n```\n", encoding="utf-8")
    subprocess.run("git init -q && git add .", cwd=tmp_path, shell=True, check=True)
    ran = subprocess.run(["python3", "ci/prose.py", "--lower"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == code and ran.stdout.startswith("1 phrases"), ran.stderr
    assert f"\nCEILING = {left}\n" in (tmp_path / "ci" / "prose.py").read_text(encoding="utf-8")
