"""Graft's developer commands. They need Python 3.11 or newer and nothing else:

python dev.py demo                      train, average, apply and sample with the bundled tiny model
python dev.py test                      run the tests (15 minutes on two cores)
python dev.py test --quick              run the quick tests (3 minutes on two cores), before every commit
python dev.py test [pytest arguments]   run some tests: a file, -k NAME, --lf for those that failed last time
python dev.py browser [pytest arguments]  run the tests of the editor in a real browser, Chromium (13 minutes)
python dev.py front-ends [VERSION …] [pytest arguments]  run the tests that depend on ComfyUI's front end on others than
                                        the installed one, put into build/ (half an hour each); the newest also on each
                                        ComfyUI that COMFYUI_PATH names
python dev.py write                     write what follows from the nodes' declarations: the record of inputs, the
                                        English texts, the tables of docs/coming_from.md, and the templates
python dev.py check                     formatter, linters, type checker, links of the documents' site, known
                                        vulnerabilities of the packages
python dev.py site                      the documents' site alone, in build/site
python dev.py host [pytest arguments]   run the tests on each ComfyUI that COMFYUI_PATH names, one after another, or on
                                        ~/ComfyUI
python dev.py newer-torch [test|host|browser] [pytest arguments]  run these tests (test, if none is named) on a newer
                                        torch, in an environment of its own in build/; GRAFT_TORCH=2.15.0 does the same
                                        for every command
python dev.py templates [TEMPLATE …] [--write]  compare what Graft makes of ComfyUI's own templates with what its front
                                        end exports in a browser: COMFYUI_PATH or ~/ComfyUI; --help lists the options
python dev.py execution-tests CHECKOUT …  run ComfyUI's own execution tests on the embedded host: of a folder, or of a
                                        version such as v0.33.0, which is fetched (5 minutes each)
python dev.py trainer-files [TRAINER[=CHECKOUT] …]  compare Graft, and ComfyUI's own loader, with the networks of
                                        trainers whose files they read, and write docs/trainer_files.md: COMFYUI_PATH
                                        or ~/ComfyUI
python dev.py second-device [pytest arguments]  run the node tests on a device that refuses what a GPU refuses (no GPU
                                        needed); GRAFT_TEST_COMFYUI=CHECKOUT does it on a real ComfyUI, and
                                        GRAFT_TEST_DYNAMIC=1 beside that with the dynamic VRAM of ComfyUI 0.33
python dev.py long                      run the long tests: kill -9 in many places, 1,000 random sequences of patching,
                                        the demo with and without its average, training in a subgraph of the editor
python dev.py fuzz [TARGET …] [--cases N] [--seed S]  fuzz for a night; a failure prints how to replay it
python dev.py mutate [--count N] [--seed S] [PATH …]  change the code at random places; which changes fail no test?
python dev.py soak [--minutes N]        use the editor's server for two hours, or N minutes: nothing may grow
python dev.py gpu [PART …]              check and measure on a GPU in less than 9 minutes; --help lists the parts
python dev.py lock                      write requirements/*.txt again from pyproject.toml and constraints.txt

`gpu` runs in the Python that starts it and installs nothing. Every other command makes `.venv` beside this file and
installs what it needs: packages by their hash in requirements/*.txt, then torch by its version in constraints.txt (its
build depends on the machine), then Graft itself.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
# The torch to test with, in an environment of its own; without it the one in constraints.txt.
TORCH = os.environ.get("GRAFT_TORCH", "")
NEWER_TORCH = "2.15.0"  # the newest that the tests pass on
# The front ends to test with beside the installed one of requirements/develop.txt: the oldest and the newest.
FRONT_ENDS = ("1.27.10", "1.58.1")
# What writes files from the nodes' declarations.
WRITERS = (
    "tests.nodes.write_inputs",
    "locales.write_english",
    "docs.write_coming_from",
    "example_workflows.write_templates",
)
FRONT_END_TESTS = tuple(
    f"tests/editor/test_browser_{name}.py"
    for name in ("errors", "first_lora", "widgets", "workflows", "graphs", "looks")
)
REAL_FRONT_END_TESTS = tuple(f"tests/with_comfyui/test_{name}.py" for name in ("errors", "first_lora", "templates"))
VENV = ROOT / "build" / f"torch-{TORCH}" if TORCH else ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
WORKFLOW = ROOT / "demo" / "every_node.json"

# requirements/NAME.txt -> the extras of pyproject.toml that it holds.
LOCKS = {"demo": ("standalone",), "develop": ("standalone", "test", "comfyui", "benchmarks")}
LOCK_HEADER = (
    "# Written by `python dev.py lock` from pyproject.toml and constraints.txt. torch is left out: its build depends on"
    " the machine.\n"
)
# torch's own builds differ by machine (CPU, CUDA, ROCm), and these packages come with some of them.
UNLOCKED = ("torch", "triton")
UNLOCKED_FAMILIES = ("nvidia-", "cuda-")

TYPED_PACKAGES = ("settings", "storage", "patches", "ema", "training", "host", "nodes", "demo", "headless")
SITE_PAGES = (
    "README.md",
    "docs",
    "web/docs",
    "comfyui_api_stubs/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "GRAFT_TEST_THREADS": "1"}  # a test process computes on one core
EMBEDDED_HOST_TESTS = "comfyui_api_stubs/tests"  # with settings of their own, in its pyproject.toml
TIERS = ("test", "host", "browser")  # what runs on a newer torch too
LONG_RUNS = {
    "fuzz": "graft_nodes.tests.fuzz",
    "mutate": "graft_nodes.tests.mutation",
    "soak": "graft_nodes.tests.faults.soak",
}


def install(lock: str) -> None:
    """Make the virtual environment and install Graft with the packages of one lock file, if that was not done yet."""
    files = ("pyproject.toml", "constraints.txt", f"requirements/{lock}.txt")
    state = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in files)).hexdigest()[:16]
    stamp = VENV / f"graft-{lock}-{state}"
    if stamp.exists():
        return
    if not PYTHON.exists():
        print(f"dev.py: making {VENV}", flush=True)
        venv.create(VENV, with_pip=True)
    print(f"dev.py: installing requirements/{lock}.txt, torch and Graft", flush=True)
    pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--require-hashes", "--no-deps", "-r", f"requirements/{lock}.txt")
    run(*pip, *([f"torch=={TORCH}"] if TORCH else ["-c", "constraints.txt", "torch"]))
    run(*pip, "--no-deps", "--no-build-isolation", "-e", ".")
    stamp.touch()


def run(*arguments: str, environment: dict[str, str] | None = None, folder: Path = ROOT) -> None:
    """Run the environment's Python in the repository; leave with its exit status when that is not 0."""
    status = subprocess.call([str(PYTHON), *arguments], cwd=folder, env={**os.environ, **(environment or {})})
    if status:
        sys.exit(status)


def captured(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the environment's Python in the repository and keep what it prints."""
    return subprocess.run([str(PYTHON), *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def demo() -> None:
    """Train, average, apply and sample with the bundled tiny model; the pictures are in output/."""
    install("demo")
    start = time.monotonic()
    run("-m", "graft_nodes", "run", str(WORKFLOW), "--embedded", "--output", str(ROOT / "output"))
    run("-m", "graft_nodes.demo.compare", str(ROOT / "output"))
    print(f"dev.py: the demo took {time.monotonic() - start:.0f} s (installation not counted)")


# --- tests ------------------------------------------------------------------------------------------------------------


def test(arguments: list[str]) -> None:
    """Run the quick tests, all tests but those of the browser and the long runs, or those that the arguments name."""
    install("develop")
    if arguments == ["--quick"]:
        pytest("not slow and not long", processes=cores())
    elif not arguments:
        pytest("not long and not browser", processes=cores() + 1)  # some of the slow tests wait for another process
    else:
        run("-m", "pytest", *arguments)


def browser(arguments: list[str]) -> None:
    """Run the tests that open the editor in a browser, or those of them that the arguments name."""
    install("develop")
    if arguments:
        run("-m", "pytest", "-m", "browser", *arguments)
    else:
        pytest("browser and not long", processes=cores())


def pytest(marks: str, processes: int) -> None:
    """Run the tests with these marks in several processes of one thread each: Graft's, and the embedded host's own."""
    run("-m", "pytest", *parallel(processes), "--ignore=tests/with_comfyui", "-m", marks, environment=ONE_THREAD)
    if "not browser" in marks or "not slow" in marks:
        own = "not slow" if "not slow" in marks else ""
        run("-m", "pytest", *parallel(processes), "-m", own, EMBEDDED_HOST_TESTS, environment=ONE_THREAD)


def parallel(processes: int) -> tuple[str, ...]:
    """pytest's arguments for several processes: each takes whole files, in the order that tests/conftest.py gives."""
    return ("-n", str(processes), "--dist", "loadfile", "--no-loadscope-reorder")


def cores() -> int:
    return os.cpu_count() or 1


def host(arguments: list[str]) -> None:
    """Run the tests that a real ComfyUI can run, on each checkout that COMFYUI_PATH names, or on ~/ComfyUI."""
    install("develop")
    for checkout in os.environ.get("COMFYUI_PATH", "").split(os.pathsep):
        run("-m", "pytest", "tests/with_comfyui", "-s", *arguments, environment={"COMFYUI_PATH": checkout})


def front_ends(arguments: list[str]) -> None:
    """Run the browser tests on other front ends: those whose versions come first in the arguments, or all; leave with
    an error when a test failed on one of them.
    """
    install("develop")
    versions = list(itertools.takewhile(is_version, arguments))
    rest = arguments[len(versions) :]
    failed = []
    for version in versions or FRONT_ENDS:
        environment = {**os.environ, **ONE_THREAD, "GRAFT_TEST_FRONT_END": str(front_end(version))}
        for checkout, tests in front_end_tests(version, rest):
            where = checkout or "the embedded host"
            print(f"dev.py: front end {version} on {where}", flush=True)
            command = [str(PYTHON), "-m", "pytest", "-m", "browser", *tests]
            if subprocess.call(command, cwd=ROOT, env={**environment, "COMFYUI_PATH": checkout}):
                failed.append(f"{version} on {where}")
    if failed:
        sys.exit(f"dev.py: tests failed with front end {', '.join(failed)}")


def front_end_tests(version: str, arguments: list[str]) -> list[tuple[str, list[str]]]:
    """(ComfyUI checkout or "" for the embedded host, pytest's arguments): what to run with a front end."""
    if arguments:
        return [(os.environ.get("COMFYUI_PATH", ""), arguments)]
    runs = [("", [*parallel(cores()), *FRONT_END_TESTS])]
    if version == FRONT_ENDS[-1]:
        checkouts = os.environ.get("COMFYUI_PATH", "").split(os.pathsep)
        runs += [(checkout, list(REAL_FRONT_END_TESTS)) for checkout in checkouts if checkout]
    return runs


def is_version(text: str) -> bool:
    return text.replace(".", "").isdigit()


def front_end(version: str) -> Path:
    """The folder with the files of a version of ComfyUI's front end, fetched once into build/."""
    place = ROOT / "build" / f"front-{version}"
    static = place / "comfyui_frontend_package" / "static"
    if not (static / "index.html").exists():
        pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
        run(*pip, "--target", str(place), f"comfyui-frontend-package=={version}")
    return static


def newer_torch(arguments: list[str]) -> None:
    """Run a tier of the tests on a newer torch: this file once more, with the environment of that torch."""
    if arguments[:1] and arguments[0] in TIERS:
        tier, *arguments = arguments
    else:
        tier = "test"
    newer = {**os.environ, "GRAFT_TORCH": NEWER_TORCH}
    status = subprocess.call([sys.executable, str(ROOT / "dev.py"), tier, *arguments], env=newer)
    if status:
        sys.exit(status)


def write() -> None:
    """Write again what follows from the nodes' declarations."""
    install("develop")
    for module in WRITERS:
        run("-m", f"graft_nodes.{module}")


def templates(arguments: list[str]) -> None:
    """Compare what Graft makes of ComfyUI's own templates with what ComfyUI's front end exports."""
    install("develop")
    run("-m", "graft_nodes.tests.headless.templates", *arguments)


def execution_tests(arguments: list[str]) -> None:
    """Run ComfyUI's own execution tests, unchanged, on the embedded host."""
    install("develop")
    run("-m", "graft_nodes.tests.with_comfyui.execution_tests", *arguments)


def trainer_files(arguments: list[str]) -> None:
    """Compare what is made of the files of trainers with what their own networks compute."""
    install("develop")
    run("-m", "graft_nodes.tests.with_trainers.trainer_files", *arguments)


def second_device(arguments: list[str]) -> None:
    """Run tests with models on the second device, tests/second_device/device.py: those named, or every node test."""
    install("develop")
    folders = ["tests/second_device/checks", "tests/nodes"]
    if os.environ.get("GRAFT_TEST_DYNAMIC") == "1":
        folders.append("tests/second_device/dynamic")
    named = arguments or [*parallel(cores()), "-m", "not long", *folders]
    run("-m", "pytest", *named, environment={"GRAFT_TEST_DEVICE": "second", **ONE_THREAD})


def long() -> None:
    """Run the tests that are marked long, and the random sequences of patching a thousand times."""
    install("develop")
    run("-m", "pytest", "-m", "long", "--ignore=tests/with_comfyui")
    sequences = {"GRAFT_TEST_SEQUENCES": "1000"}
    run("-m", "pytest", "tests/nodes/test_ledger.py", "-k", "random_sequences", environment=sequences)


def gpu(arguments: list[str]) -> None:
    """Run what a GPU can check and measure, in this Python: on a GPU machine torch is there already."""
    status = subprocess.call([sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *arguments], cwd=ROOT)
    if status:
        sys.exit(status)


def long_run(name: str, arguments: list[str]) -> None:
    """Run what takes hours; --help lists its options."""
    install("develop")
    run("-m", LONG_RUNS[name], *arguments)


# --- checks -----------------------------------------------------------------------------------------------------------


def check() -> None:
    """Run the formatter, the linters and the type checker, build the site, and look for known vulnerabilities."""
    install("develop")
    run("-m", "ruff", "format", "--check", ".")
    run("-m", "ruff", "check", ".")
    check_types()
    check_javascript()
    site()
    audit()


def check_types() -> None:
    """Run mypy on every package, under the name that Graft is installed by: its imports are relative. Then on the
    embedded host, under the names that other packs import.
    """
    packages = [word for package in TYPED_PACKAGES for word in ("-p", f"graft_nodes.{package}")]
    mypy("mypy", {"graft_nodes": ROOT}, packages)
    stubs = ROOT / "comfyui_api_stubs"
    modules = {path.name: path for path in (stubs / "modules").iterdir() if path.name != "__pycache__"}
    names = [word for path in modules.values() for word in ("-m" if path.suffix else "-p", path.stem)]
    own = [path.stem for path in stubs.glob("*.py") if path.stem != "__init__"]  # -p would take the modules once more
    names += [word for name in own for word in ("-m", f"comfyui_api_stubs.{name}")]
    names += ["-p", "comfyui_api_stubs.editor", "-p", "comfyui_api_stubs.workflows"]
    mypy("mypy_stubs", {"comfyui_api_stubs": stubs, **modules}, names)


def mypy(name: str, linked: dict[str, Path], arguments: list[str]) -> None:
    """Run mypy in a folder of build/ where packages and modules have the names that they are imported by."""
    folder = ROOT / "build" / name
    folder.mkdir(parents=True, exist_ok=True)
    for link in folder.iterdir():
        if link.is_symlink():
            link.unlink()
    for link, path in linked.items():
        (folder / link).symlink_to(path, target_is_directory=path.is_dir())
    settings = ("--config-file", str(ROOT / "pyproject.toml"))
    run("-m", "mypy", *settings, *arguments, environment={"MYPYPATH": str(folder)}, folder=folder)


def site() -> None:
    """Build the documents' site into build/site; leave with an error when a link leads nowhere."""
    install("develop")
    pages = ROOT / "build" / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    for name in SITE_PAGES:
        link = pages / ("index.md" if name == "README.md" else name)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(ROOT / name)
    run("-m", "mkdocs", "build", "--strict", "--quiet", environment={"NO_MKDOCS_2_WARNING": "1"})


def check_javascript() -> None:
    """Run the JavaScript linter, or say that npm is missing."""
    npm = shutil.which("npm")
    if npm is None:
        print("dev.py: the JavaScript was NOT checked: npm is not installed")
        return
    if not (ROOT / "node_modules").exists():
        subprocess.check_call([npm, "ci", "--silent", "--no-audit", "--no-fund"], cwd=ROOT)
    status = subprocess.call([npm, "run", "--silent", "lint"], cwd=ROOT)
    if status:
        sys.exit(status)


def audit() -> None:
    """Leave with an error when a locked package has a known vulnerability; say so when the data cannot be reached."""
    options = ("--disable-pip", "--no-deps", "--progress-spinner", "off", "-f", "json")
    answer = captured("-m", "pip_audit", "-r", "requirements/develop.txt", *options)
    packages = []
    if answer.stdout.startswith("{"):
        packages = json.loads(answer.stdout)["dependencies"]
    known = [package for package in packages if "vulns" in package]
    vulnerable = [package for package in known if package["vulns"]]
    if vulnerable:
        sys.exit("dev.py: known vulnerabilities:\n" + "\n".join(map(vulnerabilities, vulnerable)))
    if known:
        others = len(packages) - len(known)
        print(f"dev.py: no known vulnerability in {len(known)} locked packages ({others} are not in the data)")
        return
    reason = "it knows none of the packages"
    if not packages:
        reason = (answer.stderr.strip().splitlines() or ["no output"])[-1][:200]
    print(f"dev.py: known vulnerabilities were NOT looked for: pip-audit cannot reach its data ({reason})")


def vulnerabilities(package: dict) -> str:
    """One package of pip-audit's answer, with its vulnerabilities, as a line."""
    names = ", ".join(entry["id"] for entry in package["vulns"])
    return f"{package['name']} {package['version']}: {names}"


# --- locked requirements ----------------------------------------------------------------------------------------------


def lock() -> None:
    """Resolve pyproject.toml within constraints.txt for Python 3.11 and newer on every platform; write the hashes."""
    install("develop")
    for name, extras in LOCKS.items():
        wanted = [word for extra in extras for word in ("--extra", extra)]
        source = ("pyproject.toml", "-c", "constraints.txt", *wanted, "--group", "build")
        form = (
            "--universal",
            "--python-version",
            "3.11",
            "--generate-hashes",
            "--no-annotate",
            "--no-header",
            "--quiet",
        )
        answer = captured("-m", "uv", "pip", "compile", *source, *form)
        if answer.returncode:
            sys.exit(answer.stderr)
        text = LOCK_HEADER + without_torch(answer.stdout)
        (ROOT / "requirements" / f"{name}.txt").write_text(text, encoding="utf-8")


def without_torch(resolved: str) -> str:
    """A resolution without torch and the packages that come with it."""
    kept = []
    keep = True
    for line in resolved.splitlines():
        if line and not line[0].isspace():
            keep = is_locked(line)
        if keep:
            kept.append(line)
    return "\n".join(kept) + "\n"


def is_locked(line: str) -> bool:
    """Whether the first line of a resolution's entry names a package that the lock files hold."""
    name = line.partition("==")[0]
    return name not in UNLOCKED and not name.startswith(UNLOCKED_FAMILIES) and not line.startswith("#")


def main(arguments: list[str]) -> None:
    """Run the named command."""
    if sys.version_info < (3, 11):
        version = sys.version.split()[0]
        sys.exit(f"dev.py needs Python 3.11 or newer, and this is {version} (inside ComfyUI, Graft runs on 3.10 too)")
    alone = {"demo": demo, "write": write, "check": check, "site": site, "long": long, "lock": lock}
    with_arguments = {
        "test": test,
        "browser": browser,
        "host": host,
        "front-ends": front_ends,
        "newer-torch": newer_torch,
        "templates": templates,
        "execution-tests": execution_tests,
        "trainer-files": trainer_files,
        "second-device": second_device,
        "gpu": gpu,
    }
    name, *rest = arguments or [""]
    if name in with_arguments:
        with_arguments[name](rest)
    elif name in LONG_RUNS:
        long_run(name, rest)
    elif name in alone and not rest:
        alone[name]()
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
