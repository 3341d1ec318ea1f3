"""`hemofed demo bedside`: the commands that people type, one after the other, from a finished run to a slide report."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from pipeline.cli.commands.run import free_path
from pipeline.cli.output import console
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import BadRun, HemofedError

SIGNER = "study lead"


def bedside_command(run: Path | None, out: Path | None) -> None:
    run = run or _newest(Path("runs"))
    out = free_path(out or run / "bedside")
    bundle, slide = out / "bundle", out / "slide"
    # keys of this demonstration alone: the user's own trust is not touched
    env = os.environ | {
        "HEMOFED_TRUST": str((out / "trust.json").resolve()),
        "HEMOFED_LABS": str((out / "labs").resolve()),
    }
    _do(env, "export", run, "-o", bundle, "--int8")
    _do(env, "trust", "add", SIGNER, bundle)
    _do(env, "demo", "slide", slide, "--seed", "3", *_scanner(run))
    _do(env, "predict", bundle, slide, "-o", out / "report")
    console.print(f"\nlook at it: {out / 'report' / 'report.html'}; the same in a browser: hemofed edge serve {bundle}", soft_wrap=True)  # fmt: skip


def _scanner(run: Path) -> list[str]:
    """The slide comes from the largest hospital's scanner, where hospitals have some."""
    from sites.population.feature_skew import Scanner

    folder = RunFolder.open(run)
    skew, held = folder.study().skew, folder.read_json("sites.json")["sites"]
    if not isinstance(skew, Scanner):
        return []
    largest = max(range(len(held)), key=lambda n: sum(list(held.values())[n]["train"]))
    return ["--scanner", skew.profiles[largest % len(skew.profiles)]]


def _newest(runs: Path) -> Path:
    done = sorted(runs.glob("*/results.json"), key=lambda p: p.stat().st_mtime)
    if not done:
        raise BadRun(f"{runs} holds no finished run; make one with `hemofed run`")
    return done[-1].parent


def _do(env: dict[str, str], *words: object) -> None:
    told = [str(word) for word in words]
    console.print(f"\n$ hemofed {shlex.join(told)}", style="bold", soft_wrap=True)
    done = subprocess.run([sys.executable, "-m", "pipeline.cli", *told], env=env, check=False)
    if done.returncode:
        raise HemofedError(f"hemofed {told[0]} ended with {done.returncode}; see above")
