"""Runs programs so that none of them outlasts its limit, and none of what it started is left."""

import json
import os
import secrets
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

# In the environment of everything that a command starts: what has it belongs to the command, whatever session or group it is in.
MARK = "ISOCOMM_GPU_CHECK"

# A program that has ended may have ended its own children just before.
FAREWELL = 2.0
# What a launcher puts before the lines of rank 0.
RANK_0 = "[rank 0] "
# How often is looked.
TICK = 0.02


@dataclass
class Outcome:
    """How a command ended."""
    command: list
    variables: dict
    limit: float
    seconds: float = 0.0
    code: int = None
    timed_out: bool = False
    # Its time was up because the budget was, before its own limit.
    is_cut: bool = False
    # Processes that were still there when it had ended, and were killed.
    left: list = field(default_factory=list)
    stdout: str = ""
    stderr: str = ""
    log: str = ""

    @property
    def ok(self):
        return self.code == 0 and not self.timed_out and not self.left

    def why(self):
        """What went wrong, in a line."""
        if self.timed_out:
            return f"killed after {self.limit:.0f} s, {self.last_words()}"
        if self.left:
            return f"{len(self.left)} process(es) left behind: {', '.join(self.left)[:200]}"
        return f"exit {self.code}: {self.last_words()}"

    def last_words(self):
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip() and not is_noise(line)]
        errors = [line for line in lines if "error" in line.lower()]
        said = (errors or lines or ["no word on standard error"])[-1]
        return said[:300]

    def last_line(self):
        """The last that it had to say on standard output, rows of JSON aside; nothing if it said nothing."""
        lines = [line.strip() for line in self.stdout.splitlines() if line.strip() and not line.startswith("{")]
        return lines[-1][:200] if lines else ""

    def row(self):
        return {"command": self.command, "environment": self.variables, "limit_s": self.limit, "seconds": round(self.seconds, 3),
                "exit": self.code, "timed_out": self.timed_out, "left": self.left, "log": self.log}


def is_noise(line):
    """What a graphics library says where there is no desktop."""
    return "XDG_RUNTIME_DIR" in line


class Child:
    """A command under way. Its output goes to two files, so that no pipe can fill or be held open."""

    def __init__(self, command, limit, environment, variables, log):
        self.out, self.err = Path(f"{log}.out"), Path(f"{log}.err")
        self.token = secrets.token_hex(8)
        self.outcome = Outcome([str(word) for word in command], variables, limit)
        environment = {**environment, **variables, MARK: self.token}
        self.started = time.monotonic()
        with open(self.out, "wb") as out, open(self.err, "wb") as err:
            try:
                self.process = subprocess.Popen(self.outcome.command, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                                env=environment, start_new_session=True)
            except OSError as error:
                self.process = None
                err.write(f"error: cannot start {command[0]}: {error.strerror}\n".encode())

    def has_ended(self):
        return self.process is None or self.process.poll() is not None

    def seconds(self):
        return time.monotonic() - self.started

    def text(self):
        return self.out.read_text(errors="replace"), self.err.read_text(errors="replace")

    def members(self):
        """The processes that belong to it, as {pid: its environment}."""
        mark = f"{MARK}={self.token}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    variables = (entry / "environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                if mark in variables:
                    found[int(entry.name)] = variables
        return found

    def kill(self):
        """Kills all of it. Again and again, since a process may start another one meanwhile."""
        end = time.monotonic() + FAREWELL
        while self.process is not None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            members = self.members()
            for pid in members:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            if self.has_ended() and not members or time.monotonic() > end:
                return
            time.sleep(TICK)

    def wait(self, seconds=None):
        """Waits for its end, at most until its limit, or so many seconds; whether it has ended."""
        end = self.started + self.outcome.limit
        if seconds is not None:
            end = min(end, time.monotonic() + seconds)
        while not self.has_ended() and time.monotonic() < end:
            time.sleep(TICK)
        return self.has_ended()

    def finish(self):
        """Waits until its limit, kills what is left, and says how it went."""
        outcome = self.outcome
        outcome.timed_out = not self.wait()
        outcome.seconds = self.seconds()
        if not outcome.timed_out:
            end = time.monotonic() + FAREWELL
            while self.members() and time.monotonic() < end:
                time.sleep(TICK)
            outcome.left = [f"{pid} ({name_of(pid)})" for pid in self.members()]
        self.kill()
        if self.process is not None:
            outcome.code = self.process.poll()
        outcome.stdout, outcome.stderr = self.text()
        return outcome


def name_of(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"


def variable(variables, name):
    """A variable of what `members` found; None without it."""
    prefix = name.encode() + b"="
    return next((each[len(prefix):].decode(errors="replace") for each in variables if each.startswith(prefix)), None)


def json_lines(text):
    """The objects among the lines of a text, rank 0's with or without its name before them; other lines are someone else's."""
    found = []
    for line in text.splitlines():
        if line.startswith(RANK_0):
            line = line[len(RANK_0):]
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                pass
    return found
