"""What the package says of itself: metadata, extras, what a wheel and a source distribution hold, for which platforms.

Owns the quick half: it reads pyproject.toml, MANIFEST.in, the workflow and what git knows, and builds nothing.  ci/checks.sh
builds a wheel twice, compares the bytes, and uses it without a compiler (ci/wheel.py).
"""

from __future__ import annotations

import ast
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import rmqstore

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest itself needs it there

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
META = PROJECT["project"]
EXTRAS = META["optional-dependencies"]
GROUPS = PROJECT["dependency-groups"]
# Every extra except `all`: what is for work on the package is a dependency group.
FOR_USERS = {"arrow", "cli", "compression", "console", "metrics", "spark", "polars", "rocksdb", "sql"}
# Names of distributions whose module has another name.
MODULE_OF = {"pyarrow": "pyarrow", "prometheus-client": "prometheus_client", "zstandard": "zstandard"}
# Modules that come with a distribution that is required: py4j with pyspark, anyio with starlette.
COMES_ALONG = {"anyio", "py4j"}
# What only a checkout has: the rest of git's files are in the source distribution.
CHECKOUT_ONLY: set[str] = set()


def tracked(*paths: str) -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z", *paths], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("this is no checkout")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]


def requirements(extra: str) -> list[Requirement]:
    """The requirements of an extra, those of the extras that it names included."""
    found = []
    for text in EXTRAS[extra]:
        requirement = Requirement(text)
        if requirement.name == "rmqstore":
            for other in requirement.extras:
                found += requirements(other)
        else:
            found.append(requirement)
    return found


def test_the_version_is_stated_once():
    assert META["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"] == {"version": {"attr": "rmqstore._version.__version__"}}
    (stated,) = re.findall(r'(?m)^__version__ = "([^"]+)"$', (ROOT / "rmqstore" / "_version.py").read_text("utf-8"))
    assert stated == rmqstore.__version__
    texts = {name: (ROOT / name).read_text("utf-8") for name in tracked("rmqstore") if name.endswith(".py")}
    assert [name for name, text in texts.items() if re.search(r"(?m)^__version__ *=", text)] == ["rmqstore/_version.py"]


def test_the_licence_is_stated_as_pep_639_has_it():
    assert META["license"] == "Apache-2.0" and META["license-files"] == ["LICENSE"]
    assert not [line for line in META["classifiers"] if line.startswith("License ::")]
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_only_lower_bounds():
    every = [
        *META["dependencies"],
        *(text for texts in [*EXTRAS.values(), *GROUPS.values()] for text in texts if isinstance(text, str)),
        *PROJECT["build-system"]["requires"],
    ]
    for text in every:
        requirement = Requirement(text)
        if requirement.name != "rmqstore":
            assert [each.operator for each in requirement.specifier] == [">="], text


def test_the_extra_all_is_every_extra_for_users_but_the_large_and_the_rare():
    (named,) = (Requirement(text).extras for text in EXTRAS["all"])
    assert named == FOR_USERS - {"polars", "rocksdb", "spark", "sql"}
    assert FOR_USERS | {"all"} == set(EXTRAS)
    text = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    listed = set(
        re.findall(r"(?m)^\| ((?:`\w+`(?:, )?)+) \| ", text.partition("| extra | for |")[2].partition("\n\n")[0])
    )
    assert {name for row in listed for name in re.findall(r"\w+", row)} == FOR_USERS | {"all"}


def test_the_library_needs_numpy_alone():
    assert [Requirement(text).name for text in META["dependencies"]] == ["numpy"]
    # Extras that are a command bring the command line too.
    for extra in ("all", "cli", "console", "sql"):
        assert {"click", "rich"} <= {each.name for each in requirements(extra)}, extra
    # Nothing of what users import needs the command line's libraries.
    loaded = (
        "import sys; sys.modules.update(click=None, rich=None); import rmqstore; from rmqstore import *; "
        "import rmqstore.rabbitmq, rmqstore.offline.export, rmqstore.offline.importing, rmqstore.polars, "
        "rmqstore.spark, rmqstore.offline.pending, rmqstore.offline.settings"
    )
    subprocess.run([sys.executable, "-c", loaded], check=True)


@pytest.mark.parametrize("absent", [("click",), ("rich",), ("click", "rich")])
@pytest.mark.parametrize("started", ["script", "module"])
def test_the_program_says_which_extra_it_needs(absent, started):
    assert META["scripts"] == {"rmqstore": "rmqstore.__main__:main"}
    start = {
        "script": "from rmqstore.__main__ import main; sys.exit(main())",
        "module": "import runpy; runpy.run_module('rmqstore', run_name='__main__')",
    }[started]
    code = f"import sys; sys.modules.update(dict.fromkeys({absent!r})); {start}"
    ran = subprocess.run([sys.executable, "-c", code, "info", "store"], capture_output=True, text=True, check=False)
    line = f"rmqstore: the command line requires {' and '.join(absent)}: install with pip install 'rmqstore[cli]'\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (3, "", line)


def test_every_library_that_the_package_imports_is_required():
    known = {MODULE_OF.get(each.name, each.name) for each in map(Requirement, META["dependencies"])}
    known |= {MODULE_OF.get(each.name, each.name) for extra in FOR_USERS for each in requirements(extra)}
    found = set()
    for name in tracked("rmqstore"):
        if name.endswith(".py"):
            tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
            for block in [node for node in ast.walk(tree) if isinstance(node, ast.If)]:
                if "TYPE_CHECKING" in ast.dump(block.test):
                    block.body = []  # what only a type checker reads
            for node in ast.walk(tree):
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    found.add((node.module or "").partition(".")[0])
    assert {"numpy", "click", "rich", "pyarrow", "pyspark"} <= found
    # pytest loads `rmqstore.testing`.
    strangers = found - known - set(sys.stdlib_module_names) - COMES_ALONG - {"rmqstore", "pytest"}
    assert strangers == set()


def test_every_file_of_the_package_goes_into_a_wheel():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    for name in tracked("rmqstore"):
        if name.endswith((".py", ".pyx", ".h", ".c")):
            continue
        path = Path(name)
        matches = any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns["*"])
        for package, globs in patterns.items():
            folder = package.replace(".", "/") + "/"
            if package != "*" and name.startswith(folder):
                matches |= any(fnmatch.fnmatch(name.removeprefix(folder), pattern) for pattern in globs)
        assert matches, f"{name} is in no wheel: [tool.setuptools.package-data] does not name it"


def test_the_wheel_brings_the_sample_store_along(tmp_path):
    # A wheel of the tree's files without the compiled modules, which are copied to it: building them takes a minute.
    tree, site = tmp_path / "tree", tmp_path / "site"
    for name in tracked("rmqstore", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    subprocess.run(
        [sys.executable, "-c", build], cwd=tree, check=True, capture_output=True, env={**os.environ, "RMQSTORE_WITHOUT_CORE": "1"}
    )
    (wheel,) = (tree / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    size = sum(path.stat().st_size for path in (site / "rmqstore" / "sample").iterdir())
    assert 100_000 < size < 900_000
    package = Path(rmqstore.__file__).parent
    for module in package.rglob("*.so"):
        shutil.copy(module, site / module.relative_to(package.parent))
    # What is on the path comes after what is installed, so only this package is found: -P leaves the folder out.
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from rmqstore.cli import main; main()"
    for arguments, said in (
        (["demo", "--messages", "300"], "All checks passed."),
        (["demo", "--unpack", "store"], "rmqstore info store"),
        (["query", "store", "Orders", "ORD-102499"], '"order":"ORD-102499"'),
    ):
        ran = subprocess.run(
            [sys.executable, "-I", "-c", code, str(site), *arguments], cwd=tmp_path, capture_output=True, text=True,
            encoding="utf-8", env={**os.environ, "PYTHONIOENCODING": "utf-8"}, timeout=240, check=False,
        )  # fmt: skip
        assert ran.returncode == 0 and said in ran.stdout, ran.stdout + ran.stderr


def test_an_index_page_leads_to_the_project():
    urls = META["urls"]
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog", "Security"} <= urls.keys()
    home = urls["Homepage"]
    assert all(url.startswith(home) for url in urls.values())
    for url in urls.values():
        name = url.removeprefix(f"{home}/blob/main/")
        assert name == url or (ROOT / name).is_file(), url
    # A page there knows no folder: every link and picture of the README has its whole address, and leads to a file.
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = dict(re.findall(r"(?m)^\[([\w-]+)\]: (\S+)$", text))
    used = re.findall(r"\]\[([\w-]+)\]", text)
    assert set(used) == set(named)
    links = [*named.values(), *re.findall(r"\]\(([^)\s]+)\)", text)]
    assert len(links) >= 20 and [link for link in links if not link.startswith(("https://", "#"))] == []
    raw = home.replace("https://github.com/", "https://raw.githubusercontent.com/") + "/main/"
    for link in links:
        for base in (f"{home}/blob/main/", f"{home}/tree/main/", raw):
            if link.startswith(base):
                assert (ROOT / link.removeprefix(base).partition("#")[0]).exists(), link
    (picture,) = re.findall(r"!\[[^\]]+\]\[([\w-]+)\]", text)
    assert named[picture].startswith(raw)


def test_the_readme_is_read_in_a_minute():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 100
    assert lines[0] == "rmqstore reads and writes the on-disk store of Apache RocketMQ and RabbitMQ from Python."
    # After the definition: Python, a shell, the picture.
    begin = "\n".join(lines[:27])
    assert "pip install" in begin and "$ rmqstore " in begin and "![" in begin
    assert begin.index("from rmqstore import") < begin.index("$ rmqstore ") < begin.index("![")
    # Both commands for a checkout.
    assert {"make demo", "make test"} <= set(re.findall(r"make (?:demo|test)\b", "\n".join(lines)))


def test_there_is_a_way_to_report_what_is_dangerous():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert META["urls"]["Homepage"] + "/security/advisories/new" in text
    assert "Supported versions" in text


def test_classifiers_name_what_tests_run_on():
    systems = [line for line in META["classifiers"] if line.startswith("Operating System")]
    assert systems == ["Operating System :: POSIX :: Linux"]
    classifiers = pytest.importorskip("trove_classifiers")
    assert set(META["classifiers"]) <= classifiers.classifiers


def test_a_workflow_runs_the_tests():
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))
    # "on" is a boolean in YAML 1.1.
    assert {"push", "pull_request"} <= set(workflow[True])
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    pythons = {str(each) for each in jobs["test"]["strategy"]["matrix"]["python"]}
    named = {line.rpartition(" ")[2] for line in META["classifiers"] if re.search(r":: 3\.\d+$", line)}
    assert pythons == named
    commands = "\n".join(step["run"] for job in jobs.values() for step in job["steps"] if "run" in step)
    assert {"make test", "make demo", "make check"} <= set(re.findall(r"make \w+", commands))
    makefiles = [(ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "ci/long.mk")]
    targets = set(re.findall(r"(?m)^([a-z-]+):", "\n".join(makefiles)))
    for target in re.findall(r"make ([a-z-]+)", commands):
        assert target in targets
    for script in re.findall(r"\bci/\S+\.(?:sh|py)", commands):
        assert (ROOT / script).is_file()


def test_every_action_is_pinned_by_commit():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for used in re.findall(r"uses: *(.*)", path.read_text(encoding="utf-8")):
            assert re.fullmatch(r"[\w-]+/[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", used), f"{path.name}: {used}"


def test_the_source_distribution_holds_what_git_knows(monkeypatch):
    from setuptools.command.egg_info import FileList

    monkeypatch.chdir(ROOT)
    files = FileList()
    files.findall()
    for line in (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            files.process_template_line(line)
    # Setuptools adds these by itself.
    there = {Path(name).as_posix() for name in files.files} | {"pyproject.toml", "MANIFEST.in"}
    there |= {name for name in tracked("rmqstore") if name.endswith(".py")}
    assert set(tracked()) - there == CHECKOUT_ONLY


def test_wheels_are_built_for_the_pythons_that_are_named():
    config = PROJECT["tool"]["cibuildwheel"]
    versions = [re.fullmatch(r"cp3(\d+)-\*", each)[1] for each in config["build"] if each != "cp314t-*"]
    assert "cp314t-*" in config["build"] and any("Free Threading" in line for line in META["classifiers"])
    assert [f"Programming Language :: Python :: 3.{minor}" for minor in versions] == [
        line for line in META["classifiers"] if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", line)
    ]
    # The suite runs on each: by ci/pythons.sh, and on 3.11 by everything else.
    (others,) = re.findall(r"(?m)^VERSIONS=\((.*)\)$", (ROOT / "ci" / "pythons.sh").read_text(encoding="utf-8"))
    assert {*others.split(), "3.11"} == {f"3.{minor}" for minor in versions}
    allowed = SpecifierSet(META["requires-python"])
    assert f"3.{versions[0]}" in allowed and f"3.{int(versions[0]) - 1}" not in allowed
    for word in config["test-command"].split()[1:]:
        if word.startswith("{project}/"):
            assert (ROOT / word.removeprefix("{project}/")).is_file()


@pytest.mark.parametrize(
    ("platform", "arch", "expected"),
    [
        (
            "linux",
            "x86_64,aarch64",
            {"manylinux_x86_64", "musllinux_x86_64", "manylinux_aarch64", "musllinux_aarch64"},
        ),
        ("macos", "arm64,x86_64", {"macosx_arm64", "macosx_x86_64"}),
    ],
)
def test_cibuildwheel_reads_the_configuration(platform, arch, expected):
    pytest.importorskip("cibuildwheel")
    command = [
        sys.executable,
        "-m",
        "cibuildwheel",
        "--platform",
        platform,
        "--archs",
        arch,
        "--print-build-identifiers",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    built = {tuple(line.split("-", 1)) for line in done.stdout.split()}
    pythons = [each.removesuffix("-*") for each in PROJECT["tool"]["cibuildwheel"]["build"]]
    assert built == {(python, system) for python in pythons for system in expected}


def test_the_workflow_builds_on_each_architecture():
    yaml = pytest.importorskip("yaml")
    (path,) = (ROOT / ".github" / "workflows").glob("wheels.yml")
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    machines = workflow["jobs"]["wheels"]["strategy"]["matrix"]["os"]
    # Hosted macOS machines are arm64 unless their name says otherwise, the others x86-64.
    systems = {each: "macos" if each.startswith("macos") else "linux" for each in machines}
    arms = {each: "intel" not in each if systems[each] == "macos" else "arm" in each for each in machines}
    assert {(systems[each], arms[each]) for each in machines} == {
        (system, arm) for system in ("linux", "macos") for arm in (False, True)
    }
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert any("cibuildwheel" in each for each in commands) and any("SOURCE_DATE_EPOCH=" in each for each in commands)
    for script in re.findall(r"\bci/\S+\.py", "\n".join(commands)):
        assert (ROOT / script).is_file()
    assert workflow["permissions"] == {"contents": "read"}


@pytest.mark.parametrize(
    ("without", "named"), [("compiler", "apt install gcc python3-dev"), ("headers", "apt install python3-dev")]
)
def test_a_build_without_a_compiler_or_headers_names_what_to_install(tmp_path, without, named):
    pytest.importorskip("setuptools")
    shutil.copy(ROOT / "setup.py", tmp_path)
    program = "import runpy, sys, sysconfig; sys.argv[1:] = ['build_ext']; "
    if without == "headers":
        program += "sysconfig.get_path = lambda *names: '/no/such/folder'; "
    env = {**os.environ, "CC": "no-such-compiler" if without == "compiler" else sys.executable}
    program += "runpy.run_path('setup.py', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert "error: rmqstore is compiled from source here, which needs" in done.stderr and named in done.stderr
    # It ends before Cython begins, which takes a minute and a half.
    assert not (tmp_path / "build").exists()


@pytest.mark.parametrize("installed", [False, True])
def test_a_source_folder_without_the_compiled_core_says_so(tmp_path, installed):
    # After `pip install .` the checkout hides what was installed, and "No module named 'rmqstore._core'" taught nobody.
    shutil.copytree(ROOT / "rmqstore", tmp_path / "checkout" / "rmqstore", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "site" / "rmqstore").mkdir(parents=True)
    (tmp_path / "site" / "rmqstore" / "__init__.py").touch()
    # Without site packages and PYTHONPATH, so that no other build is found.
    path = f"sys.path.append({str(tmp_path / 'site')!r}); " if installed else ""
    code = f"import sys; sys.path.insert(0, ''); {path}import rmqstore"
    ran = subprocess.run(
        [sys.executable, "-S", "-I", "-c", code], cwd=tmp_path / "checkout", capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    (sentence,) = [line for line in ran.stderr.splitlines() if line.startswith("ImportError: ")]
    assert str(tmp_path / "checkout" / "rmqstore") in sentence and "make build" in sentence
    assert (str(tmp_path / "site" / "rmqstore") in sentence) == installed
