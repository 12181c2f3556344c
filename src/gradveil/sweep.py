"""Many independent jobs, each a process of its own: JSON in, one result file out, resumed by file.

A job is plain data; `entry` names a function that takes it and returns plain data. The result file is named after
both, so a sweep that is started again does only what is missing, on one machine or on many. Jobs run in local
processes, or on a Ray cluster (it comes with the Flower extra) when an address is given. Results do not depend on
where or in which order jobs run, as long as the function draws its random numbers from the job.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from . import check
from .errors import ConfigError
from .spec import import_object

Job = dict[str, Any]


class Outcome(NamedTuple):
    """How one job ended."""

    job: Job
    result: Any  # what the function returned; None if it failed
    error: str  # the end of its traceback; empty if it worked


def run_jobs(
    jobs: Sequence[Job],
    entry: str,
    folder: Path,
    *,
    workers: int = 1,
    ray: str | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> list[Outcome]:
    """Run every job that has no result file yet, and return all outcomes in the order of the jobs.

    Args:
        jobs: plain data, one dict per job.
        entry: `package.module:function`, importable wherever the jobs run.
        folder: where result files are, one per job; a job that fails leaves none and is tried again next time.
        workers: local processes at a time.
        ray: the address of a Ray cluster, such as `auto` or `10.0.0.1:6379`; None runs here.
        tell: called with (jobs done, jobs in all) after each one.
    """
    check.at_least(1, workers=workers)
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{job_id(job, entry)}.json" for job in jobs]
    # The same job twice is one job.
    missing = {file: job for file, job in zip(files, jobs, strict=True) if not file.exists()}
    errors: dict[Path, str] = {}
    ended = _on_ray(missing, entry, ray) if ray is not None else _here(missing, entry, workers)
    done = len(set(files)) - len(missing)
    with closing(ended):  # so that an interruption here stops what still runs
        for file, error in ended:
            errors[file] = error
            done += 1
            tell(done, len(set(files)))
    return [_outcome(job, file, errors.get(file, "")) for job, file in zip(jobs, files, strict=True)]


def job_id(job: Job, entry: str) -> str:
    """Return the name of a job: the same data and function give the same name on every machine.

    >>> job_id({"a": 1, "b": [2]}, "m:f") == job_id({"b": [2], "a": 1}, "m:f")
    True
    """
    try:
        text = json.dumps({"entry": entry, "job": job}, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a job must be plain JSON data: {error}") from error
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def run_one(job: Job, entry: str) -> str:
    """Run one job in this process and return its result file's text."""
    import torch

    torch.set_num_threads(1)  # so that results do not depend on the machine's number of cores
    result = import_object(entry)(job)
    return json.dumps({"entry": entry, "job": job, "result": result}, sort_keys=True)


def _here(missing: dict[Path, Job], entry: str, workers: int) -> Generator[tuple[Path, str], None, None]:
    processes = _Processes()
    pool = ThreadPoolExecutor(workers)
    try:
        waiting = {pool.submit(processes.run, job, entry, file): file for file, job in missing.items()}
        for future in as_completed(waiting):
            yield waiting[future], future.result()
    finally:  # at the end, and when somebody presses Ctrl-C
        pool.shutdown(wait=False, cancel_futures=True)
        processes.stop()


class _Processes:
    """Jobs that run in processes of their own, all of which can be stopped."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def run(self, job: Job, entry: str, file: Path) -> str:
        """Run one job; return the end of its error output if it failed."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "gradveil.sweep", entry, str(file)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, text=True) as process:
            self._running.add(process)
            if self._stopped:  # it may have been started while `stop` went through the others
                process.terminate()
            _, errors = process.communicate(json.dumps(job))
            self._running.discard(process)
        return "" if process.returncode == 0 else errors[-4000:] or f"exit code {process.returncode}"

    def stop(self) -> None:
        """End every process, also one that is just being started."""
        self._stopped = True
        for process in list(self._running):
            process.terminate()


def _on_ray(missing: dict[Path, Job], entry: str, address: str) -> Generator[tuple[Path, str], None, None]:
    try:
        import ray
    except ImportError as error:
        raise ConfigError('Ray is not installed: pip install "gradveil[flower]"') from error
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported home
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # jobs see the GPUs of their machine
    started_here = not ray.is_initialized()
    if started_here:
        ray.init(address=None if address == "local" else address, log_to_driver=False, configure_logging=False)
    try:
        # max_calls=1: a fresh process for each job, as on one machine.
        remote = ray.remote(num_cpus=1, max_calls=1, max_retries=1)(run_one)
        waiting = {remote.remote(job, entry): file for file, job in missing.items()}
        while waiting:
            (ready,), _ = ray.wait(list(waiting), num_returns=1)
            file = waiting.pop(ready)
            try:
                _write(file, ray.get(ready))
                yield file, ""
            except ray.exceptions.RayError as error:
                yield file, str(error)[-4000:]
    finally:
        if started_here:
            ray.shutdown()


def _outcome(job: Job, file: Path, error: str) -> Outcome:
    if error or not file.exists():
        return Outcome(job, None, error or "no result")
    return Outcome(job, json.loads(file.read_text())["result"], "")


def _write(file: Path, text: str) -> None:
    """Replace a file as a whole, so that a result file is never half a result."""
    handle, scratch = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".tmp")
    with os.fdopen(handle, "w") as stream:
        stream.write(text)
    Path(scratch).replace(file)


def main() -> None:
    """Run the job on standard input: `python -m gradveil.sweep package.module:function RESULT.json < job.json`."""
    entry, file = sys.argv[1:]
    _write(Path(file), run_one(json.load(sys.stdin), entry))


if __name__ == "__main__":
    main()
