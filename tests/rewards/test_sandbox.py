"""The sandbox with real checkers: every failure really happens, and nothing is left running."""

import json
import logging
import math
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from trl_ext.rewards import SandboxedReward, sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")

PYTHON = [sys.executable, "-I", "-S", "-c"]
HAS_NAMESPACES = sys.platform == "linux" and bool(sandbox._namespaces(False, None)[0])
needs_namespaces = pytest.mark.skipif(not HAS_NAMESPACES, reason="the kernel or container refuses user namespaces")
SYSTEM_PYTHON = shutil.which("python3", path="/usr/local/bin:/usr/bin")
needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not SYSTEM_PYTHON or not HAS_NAMESPACES,
    reason="needs root, and a Python that everybody may run",
)


def make(code, **options):
    """A reward whose checker is the Python program `code`, without network where that can be had."""
    return SandboxedReward([*PYTHON, code], **{"network": not HAS_NAMESPACES, "name": "check", **options})


def check(code, completion="x", **options):
    """Score and reason of one completion."""
    extra = {}
    scores = make(code, **options)([completion], log_extra=extra.__setitem__)
    return scores[0], extra["sandbox/check"][0]


def processes_with(mark):
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:
            pass
    return found


@pytest.mark.parametrize(
    "printed, score",
    [
        ("0.5", 0.5),
        ("-3", -3.0),
        ('{"reward": 2, "why": "ok"}', 2.0),
        ("null", None),
        ('{"reward": null}', None),
        ("9\nthe next line counts\n1e-3\n\n", 0.001),
        ("1\u20282\n7", 7.0),
    ],
)
def test_scores(printed, score):
    assert check(f"import sys; sys.stdout.buffer.write({printed!r}.encode())") == (score, "")


@pytest.mark.parametrize(
    "printed",
    [
        "",
        "good",
        "NaN",
        "Infinity",
        "-Infinity",
        '"inf"',
        "1e999",
        "1e39",  # infinite as float32
        "9" * 400,
        "9" * 5000,
        "true",
        "[1]",
        '{"score": 1}',
        '{"reward": "1"}',
        "1 2",
        "[" * 5000,
    ],
)
def test_what_is_no_finite_number_is_a_failure(printed):
    with pytest.raises(sandbox._CheckFailed) as failure:
        sandbox._score(printed.encode())
    assert failure.value.kind == "invalid"


@pytest.mark.parametrize(
    "code, reason",
    [
        ("print('NaN')", "invalid: not a finite number"),
        ("print(1); raise SystemExit(1)", "exit: exit status 1"),
        ("print(1); raise ValueError('no such unit')", "exit: exit status 1; ValueError: no such unit"),
        ("print(1, flush=True); import os; os.abort()", "exit: killed by signal 6"),
        ("print(1, flush=True); import os; os.kill(os.getpid(), 9)", "exit: killed by signal 9"),
        ("x = bytearray(1 << 33); print(1)", "memory: MemoryError"),
        ("while True: print('x' * 1000)", "output: more than 1048576 bytes"),
        ("import sys\nwhile True: print('x' * 1000, file=sys.stderr)", "output: more than 1048576 bytes"),
    ],
)
def test_failures_give_nan_and_a_reason(code, reason):
    score, why = check(code)
    assert math.isnan(score) and why.startswith(reason), why


@pytest.mark.parametrize(
    "code", ["import time; time.sleep(60)", "import os, time; os.close(1); os.close(2); time.sleep(60)"]
)
def test_wall_time(code):
    start = time.monotonic()
    score, why = check(code, timeout=0.4)
    assert math.isnan(score) and why == "timeout: no result after 0.4 s"
    assert time.monotonic() - start < 3


def test_cpu_time_of_a_process():
    code = "import os, resource; print(resource.getrlimit(resource.RLIMIT_CPU)[0]); os.kill(os.getpid(), 24)"
    assert check(code, timeout=8.5)[1] == "timeout: CPU time used up"
    assert check(code.split("; os.kill")[0], timeout=8.5)[0] == 9.0


def test_limits_that_only_the_kernel_shows():
    code = """
import os, resource
assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
assert resource.getrlimit(resource.RLIMIT_AS) == (300 << 20, 300 << 20)
assert resource.getrlimit(resource.RLIMIT_FSIZE) == (300 << 20, 300 << 20)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
assert status["NoNewPrivs"].strip() == "1"
assert int(status["CapBnd"], 16) == int(status["CapEff"], 16) == 0 or os.getuid()
try:
    resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))
except (ValueError, PermissionError):
    print(1)
"""
    assert check(code, memory_mb=300) == (1.0, "")
    assert check("import resource; print(resource.getrlimit(resource.RLIMIT_AS)[0])", memory_mb=None)[0] == -1.0


def test_a_file_that_grows_too_large():
    code = """
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
with open("f", "wb") as file:
    for _ in range(80):
        file.write(bytes(1 << 20))
print(1)
"""
    assert check(code, memory_mb=64)[1].startswith("exit: killed by signal 25")
    assert check(code, memory_mb=100) == (1.0, "")


def test_no_signal_is_ignored():
    extra = {}
    reward = SandboxedReward("grep SigIgn /proc/self/status", network=not HAS_NAMESPACES, name="check")
    reward([""], log_extra=extra.__setitem__)
    assert f"SigIgn:\\t{0:016d}" in extra["sandbox/check"][0]


@needs_namespaces
def test_no_network_not_even_loopback():
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5); print(1)"
        score, why = check(code)
        assert math.isnan(score) and "unreachable" in why
        assert check(code, network=True) == (1.0, "")


@needs_namespaces
def test_other_processes_are_out_of_reach():
    code = f"import os; print(int(os.getppid() == 1)); os.kill({os.getpid()}, 0)"
    assert "ProcessLookupError" in check(code)[1]
    assert "Error" in check(f"print(len(open('/proc/{os.getpid()}/environ').read()))")[1]


def test_no_user_namespaces_no_silent_network(monkeypatch):
    monkeypatch.setattr(sandbox, "_namespaces", lambda network, user: ((), "unshare: Operation not permitted"))
    with pytest.raises(RuntimeError, match=r"Operation not permitted.*network=True"):
        SandboxedReward(["true"])
    assert SandboxedReward([*PYTHON, "print(1)"], network=True)(["x"]) == [1.0]


@pytest.fixture
def fresh_probe():
    sandbox._namespaces.cache_clear()
    yield
    sandbox._namespaces.cache_clear()


def test_the_probe_notices_a_refusal(monkeypatch, tmp_path, fresh_probe):
    refusing = tmp_path / "unshare"
    refusing.write_text("#!/bin/sh\necho 'unshare failed: No space left on device' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert sandbox._namespaces(False, None) == ((), "unshare failed: No space left on device")


def test_the_probe_without_util_linux(monkeypatch, fresh_probe):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "util-linux" in sandbox._namespaces(False, None)[1]


@needs_namespaces
def test_where_proc_cannot_be_mounted_the_rest_still_holds(monkeypatch, tmp_path, fresh_probe):
    picky = tmp_path / "unshare"
    real = shutil.which("unshare")
    picky.write_text(f'#!/bin/sh\ncase "$*" in *mount-proc*) exit 1;; esac\nexec {real} "$@"\n')
    picky.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    prefix, _ = sandbox._namespaces(False, None)
    assert "--net" in prefix and "--pid" in prefix and "--mount-proc" not in prefix
    reward = SandboxedReward([*PYTHON, f"print(len(open('/proc/{os.getpid()}/environ').read()))"], name="check")
    extra = {}
    assert math.isnan(reward(["x"], log_extra=extra.__setitem__)[0])
    assert "PermissionError" in extra["sandbox/check"][0]


def test_environment_and_folder(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    code = """
import os, stat
assert set(os.environ) == {"PATH", "LANG", "HOME", "TMPDIR", "EXTRA"}, set(os.environ)
assert os.environ["HOME"] == os.environ["TMPDIR"] == os.getcwd()
assert os.listdir() == [] and stat.S_IMODE(os.stat(".").st_mode) == 0o700
os.makedirs("a/b")
os.chmod("a", 0)
os.write(2, os.getcwd().encode())
raise SystemExit(7)
"""
    why = check(code, env={"EXTRA": "1"})[1]
    assert why.startswith("exit: exit status 7; ")
    folder = Path(why.removeprefix("exit: exit status 7; "))
    assert folder.is_absolute() and not folder.exists()


DAEMONS = """
import subprocess, sys, time
quiet = dict(stdin=-3, stdout=-3, stderr=-3)
sleep = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)", "MARK"]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True, **quiet)
again = f"import subprocess; subprocess.Popen({sleep!r}, start_new_session=True, stdin=-3, stdout=-3, stderr=-3)"
subprocess.run([sys.executable, "-I", "-S", "-c", again])
time.sleep(SECONDS)
print(1)
"""


@pytest.mark.parametrize("isolated", [pytest.param(True, marks=needs_namespaces), False])
@pytest.mark.parametrize("seconds, expected", [(0, "[1.0]"), (60, "[nan]")])
def test_nothing_is_left_running(monkeypatch, isolated, seconds, expected):
    if not isolated:
        monkeypatch.setattr(sandbox, "_namespaces", lambda network, user: ((), "off"))
    mark = uuid.uuid4().hex
    reward = make(
        DAEMONS.replace("MARK", mark).replace("SECONDS", str(seconds)), timeout=3.0 if seconds else 30.0, network=True
    )
    seen = set()
    thread = threading.Thread(target=lambda: seen.add(str(reward(["x"]))))
    thread.start()
    most = 0
    while thread.is_alive():
        most = max(most, len(processes_with(mark)))
        time.sleep(0.02)
    assert seen == {expected}
    assert seconds == 0 or most >= 4  # the launcher, the checker's three, and perhaps the checker
    assert processes_with(mark) == []


@pytest.mark.parametrize("isolated", [pytest.param(True, marks=needs_namespaces), False])
@pytest.mark.parametrize(
    "act", ["os.kill(os.getppid(), 9)", "os.kill(os.getppid(), 19)", "signal.signal(15, signal.SIG_IGN)"]
)
def test_a_checker_that_fights_back(monkeypatch, isolated, act):
    if not isolated:
        monkeypatch.setattr(sandbox, "_namespaces", lambda network, user: ((), "off"))
    mark = uuid.uuid4().hex
    score, why = check(f"import os, signal, time\n{act}\ntime.sleep(60) # {mark}", timeout=0.5, network=True)
    assert math.isnan(score) and why.startswith("timeout")
    deadline = time.monotonic() + (0 if isolated else 2)  # without a namespace nobody waits for what was killed
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert processes_with(mark) == []


def test_the_launcher_ends_by_itself_if_the_trainer_is_gone():
    mark = uuid.uuid4().hex
    command = [*PYTHON, sandbox._LAUNCHER, "1", "0", "0", *PYTHON, "import time; time.sleep(60)", mark]
    start = time.monotonic()
    assert subprocess.run(command, timeout=20).returncode == 142
    assert 2.5 < time.monotonic() - start < 15
    assert processes_with(mark) == []


@needs_root
def test_another_user_and_the_number_of_processes(monkeypatch):
    """As root, because root may choose; the limit does not hold for root itself."""
    monkeypatch.setattr(sandbox, "_PYTHON", (SYSTEM_PYTHON, "-I", "-S", "-c"))
    code = """
import os, time
count = 0
try:
    for _ in range(100):  # bounded, should the limit ever fail
        if os.fork() == 0:
            time.sleep(60)
        count += 1
except OSError:
    pass
open("mine", "w").close()
assert os.access("/proc/sys/kernel/core_pattern", os.W_OK) is False
print(os.getuid() * 1000 + count)
"""
    import pwd

    reward = SandboxedReward([SYSTEM_PYTHON, "-I", "-S", "-c", code], user="nobody", processes=12, timeout=20)
    assert reward(["x"]) == [pwd.getpwnam("nobody").pw_uid * 1000 + 11]


def test_a_process_limit_only_where_it_counts_the_row_alone(monkeypatch):
    names = ["5.14.0-362.el9.x86_64", "5.13.19", "4.18.0", "6.8.0-31-generic", "strange"]
    limits = []
    for name in names:
        monkeypatch.setattr(os, "uname", lambda name=name: os.uname_result(("Linux", "host", name, "", "")))
        limits.append(sandbox._process_limit(8, ("unshare",)))
    assert limits == [10, 0, 0, 10, 0]
    assert sandbox._process_limit(8, ()) == sandbox._process_limit(None, ("unshare",)) == 0


def received(completions, **kwargs):
    """What the checker of the first row was given."""
    rows = sandbox._rows(completions, kwargs.pop("prompts", None), kwargs)
    return json.loads(json.dumps(rows[0], allow_nan=False))


def test_the_checker_reads_one_json_object_and_then_the_end():
    code = "import json, sys; row = json.load(sys.stdin); assert sys.stdin.read() == ''; print(len(row['completion']))"
    assert make(code)(["今天好", "\ud800", ""], prompts=["p"] * 3) == [3.0, 1.0, 0.0]


def test_columns():
    row = received(
        ["a", "b"],
        prompts=["p", "q"],
        answer=["7", "8"],
        tests=[{"in": [1]}, None],
        when=[object(), 1],
        loss=[float("nan"), 1.0],
        short=[1],
        text="ab",
        completion_ids=[[1], [2]],
        trainer_state=object(),
        prompt=["old", "old"],
    )
    assert row == {"prompt": "p", "completion": "a", "answer": "7", "tests": {"in": [1]}}
    assert received(["a"]) == {"prompt": None, "completion": "a"}


def test_messages():
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    completion = [{"role": "assistant", "content": "yo"}]
    assert received([completion], prompts=[prompt]) == {
        "prompt": "hi",
        "prompt_messages": prompt,
        "completion": "yo",
        "completion_messages": completion,
    }
    image = [{"role": "user", "content": [{"type": "image", "image": object()}, {"type": "text", "text": "hi"}]}]
    assert received(["a"], prompts=[image]) == {"prompt": "hi", "completion": "a"}


def test_sixty_four_rows_in_order_and_the_metrics(caplog):
    code = """
import json, sys, time
value = json.load(sys.stdin)["value"]
time.sleep(0.05 * (value % 3 == 0))
print(value if value % 4 else "garbage")
"""
    metrics, extra = {}, {}
    with caplog.at_level(logging.WARNING):
        scores = make(code, workers=4)(
            [""] * 64, value=list(range(64)), log_metric=metrics.__setitem__, log_extra=extra.__setitem__
        )
    assert [0.0 if math.isnan(score) else score for score in scores] == [i if i % 4 else 0 for i in range(64)]
    assert metrics == {
        "sandbox/check/failed": 0.25,
        **{f"sandbox/check/failed_{kind}": 0.25 * (kind == "invalid") for kind in sandbox.FAILURES},
    }
    assert [bool(why) for why in extra["sandbox/check"]] == [i % 4 == 0 for i in range(64)]
    assert "check: 16 of 64 checks failed: invalid: the last line of output is not JSON: 'garbage'" in caplog.text


def test_two_calls_at_once():
    reward = make("import json, sys, time; time.sleep(0.1); print(json.load(sys.stdin)['value'])", workers=2)
    results = {}

    def call(first):
        results[first] = reward([""] * 4, value=[first + i for i in range(4)])

    threads = [threading.Thread(target=call, args=(first,)) for first in (0, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: [0, 1, 2, 3], 100: [100, 101, 102, 103]}


def test_rows_run_side_by_side():
    start = time.monotonic()
    make("import time; time.sleep(1); print(1)", workers=8)([""] * 8)
    assert time.monotonic() - start < 6


def test_a_program_that_vanishes(tmp_path):
    program = tmp_path / "checker"
    program.write_text("#!/bin/sh\necho 1\n")
    program.chmod(0o755)
    reward = SandboxedReward(str(program), network=not HAS_NAMESPACES)
    assert reward.__name__ == "checker" and reward([""]) == [1.0]
    program.unlink()
    extra = {}
    assert math.isnan(reward([""], log_extra=extra.__setitem__)[0])
    assert extra["sandbox/checker"][0].startswith(f"start: cannot start {program}")


def test_no_room_for_a_process(monkeypatch):
    def full(*args, **kwargs):
        raise OSError("disk full")

    reward = make("print(1)")
    monkeypatch.setattr(sandbox.tempfile, "mkdtemp", full)
    extra = {}
    assert math.isnan(reward(["x"], log_extra=extra.__setitem__)[0])
    assert extra == {"sandbox/check": ["start: disk full"]}


def test_raise_on_error():
    code = "import json, sys; print(1) if json.load(sys.stdin)['completion'] == 'ok' else sys.exit(3)"
    with pytest.raises(RuntimeError, match="check: row 1: exit: exit status 3"):
        make(code, on_error="raise")(["ok", "bad"])


def test_relative_files_become_absolute_and_name_the_reward(monkeypatch, tmp_path):
    (tmp_path / "unit_tests.py").write_text("print(4)")
    monkeypatch.chdir(tmp_path)
    reward = SandboxedReward(f"'{sys.executable}' -I unit_tests.py", network=not HAS_NAMESPACES)
    assert reward.__name__ == "unit_tests" and reward.command[-1] == str(tmp_path / "unit_tests.py")
    assert reward(["x"]) == [4.0]


def test_no_shell():
    assert (
        SandboxedReward("echo 5 ; echo 6 | cat", network=not HAS_NAMESPACES).command[1:] == "5 ; echo 6 | cat".split()
    )


def test_no_rows_and_pickling():
    reward = make("print(1)")
    assert reward([], log_metric=pytest.fail) == []
    assert pickle.loads(pickle.dumps(reward))(["x"]) == [1.0]


@pytest.mark.parametrize(
    "options, match",
    [
        ({"timeout": 0}, "timeout"),
        ({"timeout": math.inf}, "timeout"),
        ({"memory_mb": 0}, "memory_mb"),
        ({"processes": -1}, "processes"),
        ({"workers": 0}, "workers"),
        ({"on_error": "zero"}, "on_error"),
        ({"user": "no such user"}, "user"),
    ],
)
def test_bad_arguments(options, match):
    with pytest.raises(ValueError, match=f"`{match}`"):
        SandboxedReward(["true"], **options)


def test_missing_programs_are_noticed_when_it_is_made():
    with pytest.raises(FileNotFoundError, match="no_such_checker"):
        SandboxedReward(["no_such_checker"])
    with pytest.raises(ValueError, match="`command` is empty"):
        SandboxedReward("")
