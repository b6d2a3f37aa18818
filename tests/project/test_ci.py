"""The scripts of continuous integration: what a command meets that runs as a stranger.

Owns the promise of ci/stranger.sh, that what `make test` leaves out is there for `make test-rest`, and that the other environments
(another Python, aarch64, a portable build) are steps that fail where they cannot be had; each of the steps is a program that
fails by itself.
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
from long_tests import LONG
from scratch import folder_for_everybody

ROOT = Path(__file__).resolve().parents[2]
# What a command finds, as JSON.  Written in Python for the interpreter that a stranger's PATH has.
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
def stranger():
    """A function `stranger(*command, **variables)`: the finished process of a command that ran as a stranger."""
    if subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("this is no checkout")

    def run(*command, **variables):
        return subprocess.run(
            ["bash", "ci/stranger.sh", *command],
            cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    return run


def test_a_stranger_has_hardly_a_variable_and_no_rights(stranger):
    ran = stranger("python3", "-c", LOOK, PYTHONUNBUFFERED="1", LANG="de_DE.UTF-8", PIP_CACHE_DIR="/here", PIP_RETRIES="7")
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


def test_a_test_that_hangs_on_a_variable_fails_for_a_stranger(stranger):
    # As the ones did that passed only where PYTHONUNBUFFERED was set.
    command = ("python3", "-c", "import os; assert os.environ.get('PYTHONUNBUFFERED')")
    assert subprocess.run(command, env={**os.environ, "PYTHONUNBUFFERED": "1"}, check=False).returncode == 0
    ran = stranger(*command, PYTHONUNBUFFERED="1")
    assert ran.returncode == 1 and "AssertionError" in ran.stderr


def test_the_exit_code_and_the_logs_come_back_and_what_is_left_is_said(stranger, tmp_path):
    name = f"test-{tmp_path.name}-{os.getpid()}.log"
    command = f"mkdir -p build/ci && echo told > build/ci/{name} && touch $TMPDIR/left && exit 7"
    ran = stranger("bash", "-c", command)
    log = ROOT / "build" / "ci" / name
    try:
        assert ran.returncode == 7 and log.read_text() == "told\n"
        assert "left in the temporary folder" in ran.stdout and "/left" in ran.stdout
    finally:
        log.unlink(missing_ok=True)


@pytest.mark.parametrize("name", LONG)
def test_what_make_test_leaves_out_exists(name):
    path, _, begin = name.partition("::")
    assert (ROOT / "tests" / path).exists()
    if begin:
        assert f"\ndef {begin.partition('[')[0]}" in (ROOT / "tests" / path).read_text(encoding="utf-8")


@pytest.fixture
def steps(tmp_path):
    """A function `steps(closing, fails=(), seconds=0)`: ci/steps.sh, finished, begun so many seconds ago, with steps that only
    write pytest's closing line, or the words they were called with, and end."""
    (tmp_path / "ci").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(ROOT / "ci" / "steps.sh", tmp_path / "ci")

    def run(closing, fails=(), seconds=0):
        named = re.findall(r"ci/([a-z0-9]+\.sh)", (ROOT / "ci" / "steps.sh").read_text(encoding="utf-8"))
        for program in [*(tmp_path / "ci" / name for name in named), tmp_path / "bin" / "make", tmp_path / "bin" / "unshare"]:
            if program.name in ("run.sh", "steps.sh"):
                continue
            program.write_text(f"#!/bin/sh\necho {program.stem} \"$@\"\nexit {int(program.name in fails)}\n", encoding="utf-8")
            program.chmod(0o755)
        git = tmp_path / "bin" / "git"
        git.write_text("#!/bin/sh\necho 7\n", encoding="utf-8")
        git.chmod(0o755)
        tests = f"mkdir -p build/ci && echo '{closing}' > build/ci/$1.log; exit {int('tests.sh' in fails)}\n"
        (tmp_path / "ci" / "tests.sh").write_text(tests, encoding="utf-8")
        return subprocess.run(
            ["bash", "ci/steps.sh"], cwd=tmp_path,
            env={**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SECONDS": str(seconds)},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    return run


def test_steps_that_all_pass_pass(steps):
    ran = steps("==== 41 passed, 2 skipped in 1.00s ====")
    assert ran.stdout.splitlines()[-1] == "82 passed, 0 failed", ran.stdout
    assert ran.returncode == 0 and ran.stderr == ""


@pytest.mark.parametrize("failing", ["tests.sh", "checks.sh", "make", "unshare", "demo.sh"])
def test_a_step_that_fails_fails_the_steps(steps, failing):
    ran = steps("==== 3 failed, 38 passed, 1 error in 1.00s ====", fails=[failing])
    assert ran.returncode == 1
    expected = "0 passed, 1 failed" if failing == "demo.sh" else "76 passed, 8 failed"
    assert ran.stdout.splitlines()[-1] == expected and "FAILED, code 1" in ran.stdout
    # A long output is cut in its middle by most systems: what the step said last stands at the end.
    said = {"checks.sh": "checks", "make": "make venv", "unshare": "unshare", "demo.sh": "demo", "tests.sh": ""}[failing]
    reasons = re.findall(r"^=== \S+ failed; its last lines:\n(.*)$", ran.stdout, re.MULTILINE)
    assert reasons and reasons[0].startswith(said) and ran.stdout.index(" failed; its last lines:") < ran.stdout.index("=== steps")


@pytest.mark.parametrize(
    "seconds, passed_over, minutes",
    [
        (0, "", 21),
        (2000, "", 21),
        (3600, "arm64 portable", 21),
        (3950, "watched arm64 portable", 16),
        (4500, "watched instructions bench python arm64 portable", 7),
        (5300, "watched instructions bench python arm64 portable", 1),
    ],
)
def test_a_slow_machine_runs_less_and_says_so(steps, seconds, passed_over, minutes):
    """The stubs take no time; python has its turn after commit 7."""
    ran = steps("==== 41 passed in 1.00s ====", seconds=seconds)
    told = re.findall(r"^(\w+) +- s  not run, as \d+ s are gone$", ran.stdout, re.MULTILINE)
    # Each is told when its turn comes, and in the table at the end.
    assert told == passed_over.split() * 2
    begun = re.findall(r"^=== ([a-z0-9-]+): ", ran.stdout, re.MULTILINE)
    rest = [name for name in ("watched", "instructions", "bench", "python", "arm64", "portable") if name not in told]
    assert begun == ["demo", "setup", "test", "venv", "test-rest", "outages", "checks", "fuzz", *rest, "simulate"]
    # The division is of whole seconds: one that passes meanwhile may take a minute away.
    assert int(re.search(r"--minutes (\d+)", ran.stdout)[1]) in (minutes, minutes - 1)
    assert ran.returncode == 0


# ---------------------------------------------------------------------------------------------------------------
# Other environments


def words_of(script, begin):
    """What a script runs: the lines that begin so, without `|| true`."""
    lines = (ROOT / "ci" / script).read_text(encoding="utf-8").splitlines()
    return [line.removesuffix(" || true") for line in lines if line.startswith(begin)]


def test_every_environment_is_a_step_and_what_it_needs_of_root_comes_before():
    script = (ROOT / "ci" / "steps.sh").read_text(encoding="utf-8")
    steps = dict(re.findall(r"(?:^step|^in_time \d+|\) in_time \"\$2\") (\S+) (.*)$", script, re.MULTILINE))
    assert "make test-portable" in steps["portable"] and "ci/arm64.sh --short" in steps["arm64"]
    assert "ci/pythons.sh --turn" in steps["python"]
    assert "ci/watched.sh" in steps["watched"]
    watched = [line.split()[1] for line in words_of("watched.sh", "    make ")]
    assert watched == ["debug-test", "sanitize", "sanitize-threads"]
    assert words_of("watched.sh", "    SANITIZE=address bash ci/fuzz.sh ")
    # Where a mount fails these tests fail instead of being skipped.
    assert "RMQSTORE_MOUNTS=required unshare" in steps["outages"]
    assert "RMQSTORE_MAY_SKIP" not in (ROOT / "ci" / "steps.sh").read_text(encoding="utf-8")
    lent = words_of("system.sh", "bash ci/")
    assert "bash ci/pythons.sh --lend" in lent and "bash ci/arm64.sh --lend" in lent


def test_every_python_of_the_package_but_that_of_the_other_steps_has_its_turn():
    script = (ROOT / "ci" / "pythons.sh").read_text(encoding="utf-8")
    turns = re.search(r"^VERSIONS=\((.*)\)$", script, re.MULTILINE)[1].split()
    classified = re.findall(r"Python :: (3\.\d+)\"", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert turns == [version for version in classified if version != "3.11"]


@pytest.fixture
def without_sudo():
    """Tests of what a user without rights meets: root becomes one, and nobody else may be root by sudo."""
    if os.geteuid() and not subprocess.run(["sh", "-c", "sudo -n true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may be root by sudo")


@pytest.mark.parametrize(
    "command, said",
    [
        (("bash", "ci/pythons.sh", "3.99"), "3.99: there is no such interpreter here"),
        (("RMQSTORE_CACHE=/nowhere", "bash", "ci/arm64.sh"), "there is no Debian for arm64"),
    ],
    ids=["pythons", "arm64"],
)
def test_an_environment_that_is_not_there_fails_in_continuous_integration_only(stranger, without_sudo, command, said):
    for ci, code in (("true", 1), ("", 0)):
        ran = stranger(*command, CI=ci)
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


def test_a_command_in_a_debian_is_of_the_user_who_called_and_leaves_no_mount(stranger, folder_of_a_system):
    look = 'id -u; pwd; echo "$HOME"; touch "$HOME/a" "$TMPDIR/b" build-ci-note; rm "$TMPDIR/b"; cat </dev/null; exit 7'
    program = f"id -u; pwd; bash ci/debian.sh run {folder_of_a_system} bash -c '{look}'; echo code $?; stat -c %u build-ci-note"
    ran = stranger("bash", "-c", program)
    if "no user namespace" in ran.stderr:
        pytest.skip("the system gives this user no user namespace")
    user, here, *inside, code, owner = ran.stdout.splitlines()[1:]
    assert inside == [user, here, "/suite"], ran.stderr
    assert code == "code 7" and owner == user != "0"
    assert str(folder_of_a_system) not in Path("/proc/self/mounts").read_text()
    assert os.listdir(folder_of_a_system / "tmp") == []


# ---------------------------------------------------------------------------------------------------------------
# What goes on for a day


def test_a_night_has_a_day_of_simulation_and_a_day_of_fuzzing():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "lab.yml").read_text(encoding="utf-8"))["jobs"]
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
    assert ran.returncode == 0 and len(every) == len(set(every)) > 20
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
