"""Reward from an external checker: one limited process per completion, so that the trainer runs nothing untrusted."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from trl_ext.rewards.text import completion_text

logger = logging.getLogger(__name__)

FAILURES = ("timeout", "memory", "output", "exit", "invalid", "start")

_OUTPUT_LIMIT = 1 << 20
_LARGEST_FLOAT32 = 3.4028234e38
_CANNOT_START = 127
_OUT_OF_MEMORY = re.compile(rb"MemoryError|bad_alloc|[Cc]annot allocate memory|[Oo]ut ?[Oo]f ?[Mm]emory")

# Runs between `unshare` and the checker. It is text because it must start in a few milliseconds, without this package,
# and because limits set by preexec_fn can deadlock a process that has threads. The numbers are prctl's:
# 36 child subreaper, 38 no new privileges, 24 drop a capability from the bounding set.
_LAUNCHER = """
import ctypes, os, resource, signal, sys, time
seconds, memory, processes = map(int, sys.argv[1:4])
command = sys.argv[4:]
prctl = ctypes.CDLL(None).prctl

def end(code):
    # Process 1 takes its whole namespace along. Elsewhere orphans come here, as this process is their subreaper.
    while os.getpid() != 1:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            for pid in file.read().split():
                os.kill(int(pid), signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.001)
        except ChildProcessError:
            break
    os._exit(code)

def limit(kind, soft, hard):
    highest = resource.getrlimit(kind)[1]
    if highest != resource.RLIM_INFINITY:
        soft, hard = min(soft, highest), min(hard, highest)
    resource.setrlimit(kind, (soft, hard))

def check():
    limit(resource.RLIMIT_CORE, 0, 0)
    limit(resource.RLIMIT_CPU, seconds, seconds + 1)
    if memory:
        limit(resource.RLIMIT_AS, memory, memory)
        limit(resource.RLIMIT_FSIZE, memory, memory)
    if processes:
        limit(resource.RLIMIT_NPROC, processes, processes)
    for capability in range(64):
        prctl(24, capability, 0, 0, 0)
    prctl(38, 1, 0, 0, 0)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a child would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error.strerror}".encode())
        os._exit(127)

prctl(36, 1, 0, 0, 0)
signal.signal(signal.SIGTERM, lambda *_: end(143))
signal.signal(signal.SIGALRM, lambda *_: end(142))
signal.alarm(seconds + 2)  # if the trainer dies, nobody else stops this
child = os.fork()
if child == 0:
    check()
pid = status = 0
while pid != child:
    pid, status = os.wait()
code = os.waitstatus_to_exitcode(status)
end(code if code >= 0 else 128 - code)
"""


class _CheckFailed(Exception):
    """One completion could not be scored; `kind` is one of `FAILURES`."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind = kind


class SandboxedReward:
    """Reward function that runs a checker program once per completion, in a limited process of its own.

    The checker reads one JSON object from standard input: `prompt` and `completion` (texts; of a conversation the
    last message, and then the whole lists under `prompt_messages` and `completion_messages`), and those dataset
    columns of the row that JSON can hold. Its last line of output is the score: a JSON number or `{"reward": number}`;
    `null` means that the reward does not apply to the row.

    Whatever goes wrong (exit status other than 0, a limit, no finite number) gives NaN for the row, never a score.
    Metrics `sandbox/<name>/failed` and `sandbox/<name>/failed_<kind>` for each of `FAILURES`, shares of the rows in
    [0, 1]; extra column `sandbox/<name>`, the reasons.

    Args:
        command: program and arguments, as a list or as text split like a shell line; there is no shell. Relative
            names of existing files are made absolute, because the checker runs in a fresh temporary folder. For the
            Python that runs the trainer give `sys.executable`.
        timeout: seconds of wall time for a row, and of CPU time (rounded up) for each of its processes.
        memory_mb: address space of each process and size of each file it writes, in MiB; None for no limit. Runtimes
            that reserve far more than they use (Java, Node, CUDA) need None.
        processes: processes and threads of a row together; None for no limit. See the limits below.
        workers: rows checked at a time; by default one per CPU this process may use.
        network: False takes the network away, loopback included; True says "I accept network access".
        user: name of the user to run as, for example "nobody"; only root may choose one.
        env: variables for the checker. It gets these, PATH, LANG, and HOME and TMPDIR (the temporary folder), and
            inherits no other.
        name: the reward's `__name__`; by default the stem of the first file among the arguments, or of the program.
        on_error: "nan", or "raise" to stop at the first failed row, to try a checker out.

    Raises:
        RuntimeError: not Linux; `network=False` where the kernel or the container refuses user namespaces; at a call
            with `on_error="raise"`, a failed row.
        FileNotFoundError: there is no such program.
        ValueError: an argument out of range.

    Limits: time, output (1 MiB), core dumps, environment and file sizes hold on every Linux. Taking away the network,
    and ending processes that left the process group, hold through unprivileged user namespaces (`unshare`, from
    util-linux 2.35), which Docker's default profile and some distributions refuse; with `network=True` alone the
    checker then could end its own watcher. `processes` needs namespaces, Linux 5.14 and a user other than root.
    Memory is limited per process, so the bound of a row is `memory_mb` times `processes`.

    When it is wrong: *files are not hidden*. The checker reads and writes what its user may, Unix sockets such as
    Docker's included; as root that is everything, kernel settings in /proc/sys too. For more, put a stronger sandbox
    into `command` (bubblewrap, nsjail, a container). And a checker that runs the completion's code *in its own
    process* lets that code print the score. It must run it in another process, capture its output, and print the
    score after that process has ended; code of the same user can still reach the checker through /proc, unless it is
    put into namespaces or a user of its own.
    """

    def __init__(
        self,
        command: str | Sequence[str],
        *,
        timeout: float = 10.0,
        memory_mb: int | None = 1024,
        processes: int | None = 256,
        workers: int | None = None,
        network: bool = False,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        name: str | None = None,
        on_error: Literal["nan", "raise"] = "nan",
    ) -> None:
        if sys.platform != "linux":
            raise RuntimeError(f"SandboxedReward needs Linux, this is {sys.platform}. Use a plain reward function.")
        _check_positive(timeout=timeout, memory_mb=memory_mb, processes=processes, workers=workers)
        if on_error not in ("nan", "raise"):
            raise ValueError(f"`on_error` must be 'nan' or 'raise', got {on_error!r}.")
        self.timeout = float(timeout)
        self.workers = workers or len(os.sched_getaffinity(0))
        self.on_error = on_error
        self.user = _known_user(user)
        self.env = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", **(env or {})}
        self.command = _resolved(shlex.split(command) if isinstance(command, str) else list(command), self.env["PATH"])
        self.__name__ = name or _default_name(self.command)
        self._prefix = _isolation(network, self.user)
        self._limits = (math.ceil(self.timeout), (memory_mb or 0) << 20, _process_limit(processes, self._prefix))

    def __call__(
        self,
        completions: list[Any],
        prompts: list[Any] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Scores in the order of `completions`; NaN where the check failed, None where the checker said `null`."""
        if not completions:
            return []
        rows = _rows(completions, prompts, columns)
        with ThreadPoolExecutor(min(self.workers, len(rows))) as pool:
            results = list(pool.map(self._outcome, rows))
        failures = [failure for _, failure in results]
        self._report(failures, log_extra, log_metric)
        return [score for score, _ in results]

    def _outcome(self, row: dict[str, Any]) -> tuple[float | None, _CheckFailed | None]:
        try:
            return self._check(json.dumps(row, allow_nan=False).encode()), None
        except _CheckFailed as failure:
            return math.nan, failure
        except OSError as error:
            return math.nan, _CheckFailed("start", str(error))

    def _check(self, row: bytes) -> float | None:
        with (
            tempfile.TemporaryDirectory(prefix="checker-", ignore_cleanup_errors=True) as folder,
            # A file, not a pipe: it needs no thread that writes, and ends by itself.
            tempfile.TemporaryFile() as stdin,
        ):
            stdin.write(row)
            stdin.seek(0)
            if self.user:
                shutil.chown(folder, self.user)
            deadline = time.monotonic() + self.timeout
            with self._start(folder, stdin) as process:
                try:
                    output, errors = _read(process, deadline)
                    _wait(process, deadline)
                except TimeoutError:
                    raise _CheckFailed("timeout", f"no result after {self.timeout:g} s") from None
                finally:
                    _end(process)
        if process.returncode != 0:
            raise _failed_exit(process.returncode, errors)
        return _score(output)

    def _start(self, folder: str, stdin: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*self._prefix, *_PYTHON, _LAUNCHER, *map(str, self._limits), *self.command],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd=folder,
            env={"HOME": folder, "TMPDIR": folder, **self.env},
            start_new_session=True,
            **_identity(self.user),
        )

    def _report(
        self,
        failures: list[_CheckFailed | None],
        log_extra: Callable[[str, list[Any]], None] | None,
        log_metric: Callable[[str, float], None] | None,
    ) -> None:
        counts = Counter(failure.kind for failure in failures if failure)
        prefix = f"sandbox/{self.__name__}"
        if log_metric is not None:
            log_metric(f"{prefix}/failed", counts.total() / len(failures))
            for kind in FAILURES:  # zeros too: TRL averages over the calls that logged the metric
                log_metric(f"{prefix}/failed_{kind}", counts[kind] / len(failures))
        if log_extra is not None:
            log_extra(prefix, [str(failure or "") for failure in failures])
        for row, failure in enumerate(failures):
            if failure is None:
                continue
            if self.on_error == "raise":
                raise RuntimeError(f"{self.__name__}: row {row}: {failure}") from failure
            logger.debug("%s: row %d: %s", self.__name__, row, failure)
        for kind, count in counts.items():
            example = next(failure for failure in failures if failure and failure.kind == kind)
            logger.warning("%s: %d of %d checks failed: %s", self.__name__, count, len(failures), example)


_PYTHON = (sys.executable, "-I", "-S", "-c")


def _check_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"`{name}` must be a positive number, got {value!r}.")


def _known_user(user: str | None) -> str | None:
    import pwd  # not on every platform that can import this module

    if user is None:
        if os.geteuid() == 0:
            logger.warning("The checker runs as root, from which no file is safe. Set `user`, e.g. user='nobody'.")
        return None
    if os.geteuid() != 0:
        raise ValueError(f"`user` is {user!r}, but only root may run a checker as somebody else. Leave it out.")
    try:
        return pwd.getpwnam(user).pw_name
    except KeyError:
        raise ValueError(f"`user` is {user!r}, which this system does not know. Use e.g. 'nobody'.") from None


def _identity(user: str | None) -> dict[str, Any]:
    if user is None:
        return {}
    import pwd

    return {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}


def _resolved(command: list[str], path: str) -> list[str]:
    """The command with absolute file names.

    Raises:
        ValueError: it is empty.
        FileNotFoundError: there is no such program.
    """
    if not command:
        raise ValueError("`command` is empty. Give a program and its arguments.")
    program = shutil.which(command[0], path=path)
    if program is None:
        raise FileNotFoundError(f"`command`: there is no executable {command[0]!r} here or on PATH. Install it.")
    return [
        os.path.abspath(program),
        *(os.path.abspath(word) if os.path.isfile(word) else word for word in command[1:]),
    ]


def _default_name(command: list[str]) -> str:
    return Path(next((word for word in command[1:] if os.path.isfile(word)), command[0])).stem


def _isolation(network: bool, user: str | None) -> tuple[str, ...]:
    prefix, problem = _namespaces(network, user)
    if prefix:
        return prefix
    if not network:
        raise RuntimeError(
            f"`network=False` needs unprivileged user namespaces, which do not work here ({problem}). Allow them "
            "(sysctl user.max_user_namespaces, the container's security profile), or set network=True, which says that "
            "you accept network access."
        )
    logger.warning("No user namespaces (%s): a checker that means harm can outlive its time-out.", problem)
    return ()


@lru_cache(maxsize=8)
def _namespaces(network: bool, user: str | None) -> tuple[tuple[str, ...], str]:
    """The `unshare` command that works here, or () and why none does."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return (), "there is no `unshare`: install util-linux"
    flags = ["--user", "--map-current-user", "--pid", "--fork", "--kill-child", *([] if network else ["--net"])]
    problem = ""
    # Containers that hide parts of /proc refuse a new one.
    for more in (["--mount-proc"], []):
        prefix = (unshare, *flags, *more, "--")
        probe = subprocess.run([*prefix, *_PYTHON, "pass"], capture_output=True, text=True, cwd="/", **_identity(user))
        if probe.returncode == 0:
            return prefix, ""
        problem = (probe.stderr.strip().splitlines() or [f"exit status {probe.returncode}"])[-1]
    return (), problem


def _process_limit(processes: int | None, prefix: tuple[str, ...]) -> int:
    """The limit, or 0 where the kernel would count every process of the user instead of the row's own."""
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if processes is None or not prefix or version is None or (int(version[1]), int(version[2])) < (5, 14):
        return 0
    return processes + 2  # `unshare` and the launcher count too


def _rows(completions: list[Any], prompts: list[Any] | None, columns: dict[str, Any]) -> list[dict[str, Any]]:
    """One JSON-able object per completion."""
    given = [None] * len(completions) if prompts is None else prompts
    known = {
        key: cells
        for key, cells in columns.items()
        if key != "completion_ids" and _is_column(cells) and len(cells) == len(completions)
    }
    return [
        {
            **{key: cells[row] for key, cells in known.items() if _is_json(cells[row])},
            **_texts("prompt", prompt),
            **_texts("completion", completion),
        }
        for row, (prompt, completion) in enumerate(zip(given, completions, strict=True))
    ]


def _is_column(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _texts(key: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {key: None}
    messages = {f"{key}_messages": value} if isinstance(value, list) and _is_json(value) else {}
    return {key: completion_text(value), **messages}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _read(process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bytes]:
    """Standard output and error until both end.

    Raises:
        TimeoutError: the deadline came first.
        _CheckFailed: more output than allowed.
    """
    assert process.stdout and process.stderr
    received = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
    with selectors.DefaultSelector() as selector:
        for file in received:
            selector.register(file, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(deadline - time.monotonic(), 0.0))
            if not ready or time.monotonic() > deadline:
                raise TimeoutError
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                received[key.fd] += chunk
                if not chunk:
                    selector.unregister(key.fd)
            if sum(map(len, received.values())) > _OUTPUT_LIMIT:
                raise _CheckFailed("output", f"more than {_OUTPUT_LIMIT} bytes")
    output, errors = received.values()
    return output, errors


def _wait(process: subprocess.Popen[bytes], deadline: float) -> None:
    """Wait until the process has ended, but keep its entry, so that its number stays that of its group.

    Raises:
        TimeoutError: the deadline came first.
    """
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.002)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop the launcher, which takes along everything the checker started, and then what is left of the group."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        _wait(process, time.monotonic() + 1.0)
    except TimeoutError:
        pass
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _failed_exit(code: int, errors: bytes) -> _CheckFailed:
    code = code if code >= 0 else 128 - code
    reason = errors.decode(errors="replace").strip().rsplit("\n", 1)[-1][-200:]
    if _OUT_OF_MEMORY.search(errors):
        return _CheckFailed("memory", reason)
    if code == _CANNOT_START:
        return _CheckFailed("start", reason)
    if code == 128 + signal.SIGXCPU:
        return _CheckFailed("timeout", "CPU time used up")
    what = f"killed by signal {code - 128}" if 128 < code < 128 + signal.NSIG else f"exit status {code}"
    return _CheckFailed("exit", f"{what}; {reason or 'nothing on standard error'}")


def _score(output: bytes) -> float | None:
    line = output.decode(errors="replace").strip().rsplit("\n", 1)[-1]
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise _CheckFailed("invalid", f"the last line of output is not JSON: {line[-200:]!r}") from None
    if isinstance(value, dict):
        if "reward" not in value:
            raise _CheckFailed("invalid", f"no 'reward' in {line[-200:]!r}")
        value = value["reward"]
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _CheckFailed("invalid", f"not a number: {line[-200:]!r}")
    # Trainers store rewards as float32, where anything larger is infinite.
    if not abs(value) <= _LARGEST_FLOAT32:
        raise _CheckFailed("invalid", f"not a finite number: {line[-200:]!r}")
    return float(value)
