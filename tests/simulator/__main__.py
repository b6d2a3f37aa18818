"""The command: lives from seeds or from a file, on so many processes, and what became of them."""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import shutil
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
TESTS = os.path.dirname(HERE)
sys.path[:0] = [TESTS, os.path.join(TESTS, "store"), os.path.join(TESTS, "interop")]

from . import layer as layer_of  # noqa: E402
from .plan import make_plan  # noqa: E402


class WithoutPandas:
    """Arrow would load it, if it is there, and every fork would be slower for it."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("no module named pandas, for a simulator", name=name)


sys.meta_path.insert(0, WithoutPandas)


def live(plan: list, scratch: str, layer, notes):
    """One life; the Life, and the LifeFailed or None."""
    from .life import Life, LifeFailed

    folder = os.path.join(scratch, "life")
    os.mkdir(folder)
    life = Life(plan, folder, layer, notes)
    try:
        life.run()
        return life, None
    except LifeFailed as error:
        return life, error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description="Simulates the life of a store.")
    parser.add_argument("--seed", type=int, default=1, help="the first life's seed (default 1)")
    parser.add_argument("--steps", type=int, help="go on with the next seeds until so many steps were done")
    parser.add_argument("--minutes", type=float, help="go on for so long")
    parser.add_argument("--length", type=int, default=1000, help="operations of a life (default 1000)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that take every n-th seed (default 1)")
    parser.add_argument("--replay", metavar="FILE", help="a plan that was written, once")
    parser.add_argument("--plant", metavar="NAME", help="with a planted fault")
    parser.add_argument("--shrink", type=float, default=60, metavar="SECONDS", help="how long to look for a shorter plan")
    parser.add_argument("--keep-going", action="store_true", help="go on after a seed that fails (code 1 at the end)")
    parser.add_argument("--show", action="store_true", help="print the plan")
    given = parser.parse_args(arguments)
    layer_of.start_under_it(arguments)

    from .planted import PLANTED

    if given.plant is not None:
        if given.plant not in PLANTED:
            parser.error(f"--plant {given.plant}: give one of {', '.join(PLANTED)}")
    if given.jobs > 1:
        return _many(given)
    return _lives(given, given.seed, 1, given.steps)


def _many(given: argparse.Namespace) -> int:
    children = []
    share = None if given.steps is None else -(-given.steps // given.jobs)
    for number in range(given.jobs):
        sys.stdout.flush()
        child = os.fork()
        if not child:
            code = 2
            try:
                code = _lives(given, given.seed + number, given.jobs, share)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


def _lives(given: argparse.Namespace, first: int, stride: int, steps: int | None) -> int:
    from .layer import Layer, scratch_folder
    from .session import Notes, warm_up

    layer, notes = Layer(), Notes()
    with scratch_folder() as scratch:
        warm_up(scratch)
    # What lives now lives on; children need not look at it again.
    gc.freeze()
    if given.plant is not None:
        from .planted import PLANTED

        PLANTED[given.plant]()
    began, done, lives, failed, counts = time.monotonic(), 0, 0, 0, {}
    plan_of_file, digest = None, hashlib.sha256()
    if given.replay:
        with open(given.replay, encoding="utf-8") as file:
            plan_of_file = [tuple(operation) for operation in json.load(file)["plan"]]
    seed, limit = first, None if given.minutes is None else began + given.minutes * 60
    said = began
    with scratch_folder() as scratch:
        while True:
            plan = make_plan(seed, given.length) if plan_of_file is None else plan_of_file
            if given.show:
                for number, operation in enumerate(plan):
                    print(number, *operation)
            life, error = live(plan, scratch, layer, notes)
            lives, done = lives + 1, done + life.steps
            digest.update(life.digest.encode())
            for what, count in life.counts.items():
                counts[what] = counts.get(what, 0) + count
            if error is not None:
                spent = time.monotonic() - began
                print(f"seed {seed} failed after {done} steps in {lives} lives, {spent:.1f} s: {error}")
                if plan_of_file is None:
                    _report(given, seed, plan, error, scratch, layer, notes)
                if not given.keep_going:
                    return 1
                failed += 1
            now = time.monotonic()
            if now - said > 60:
                said = now
                print(f"seed {seed}: {lives} lives, {done} steps, {done / (now - began):.0f} steps/s", flush=True)
            if plan_of_file is not None or (limit is None and steps is None) or (steps is not None and done >= steps):
                break
            if limit is not None and now >= limit:
                break
            seed += stride
    spent = time.monotonic() - began
    happened = ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))
    by = f" by {stride}" if stride > 1 else ""
    # Seconds alone say little of a machine that does other things too.
    wrong = f" ({failed} failed)" if failed else ""
    print(f"seeds {first} to {seed}{by}: {lives} lives{wrong}, {done} steps in {spent:.1f} s, ", end="")
    print(f"{done / spent:.0f} steps/s, ", end="")
    print(f"{_processor_time():.1f} s of a processor; {happened}; digest {digest.hexdigest()[:16]}", flush=True)
    return int(failed > 0)


def _processor_time() -> float:
    """Seconds of a processor that this process and its children took."""
    return sum(os.times()[:4])


def _kind_of(error) -> str:
    """What went wrong, without the numbers, so that a shorter plan fails for the same reason."""
    lines = [line for line in error.text.strip().splitlines() if line and line[0] not in " ^"]
    return "".join(character for character in lines[-1] if not character.isdigit())[:40]


def _report(given: argparse.Namespace, seed: int, plan: list, error, scratch: str, layer, notes) -> None:
    planted = f" --plant {given.plant}" if given.plant else ""
    length = f" --length {given.length}" if given.length != 1000 else ""
    print(f"again: python -m tests.simulator --seed {seed}{length}{planted}", flush=True)
    if given.shrink <= 0:
        return
    from .shrink import shrink

    wanted = _kind_of(error)

    def fails(shorter: list) -> bool:
        found = live(shorter, scratch, layer, notes)[1]
        return found is not None and _kind_of(found) == wanted

    short = shrink(plan, fails, given.shrink)
    error = live(short, scratch, layer, notes)[1]
    os.makedirs(layer_of.FOLDER, exist_ok=True)
    path = os.path.join(layer_of.FOLDER, f"seed-{seed}{f'-{given.plant}' if given.plant else ''}.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"seed": seed, "planted": given.plant, "error": str(error), "plan": short}, file, indent=1)
        file.write("\n")
    print(f"{len(plan)} operations became {len(short)}: python -m tests.simulator --replay {os.path.relpath(path)}{planted}")
    print(error)


if __name__ == "__main__":
    sys.exit(main())
