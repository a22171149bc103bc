"""A check under way: runs commands within their limits and the budget, and keeps a row for each line of the table."""

import json
import os
import random
import threading
import time
from pathlib import Path

import commands
from processes import Child

HERE = Path(__file__).resolve().parent

# Less is left of the budget than any command needs.
TOO_LITTLE = 3.0

OK, FAILED, TIMED_OUT, CUT, SKIPPED = "ok", "failed", "timed out", "cut off", "skipped"


class Skip(Exception):
    """The step cannot be done here, for the reason that it says; nothing is wrong."""


class Check:
    def __init__(self, mode, out, scratch, programs, python, variables, facts, budget, say=print):
        self.mode, self.out, self.scratch, self.programs, self.python = mode, out, scratch, programs, python
        self.variables, self.facts, self.budget, self.say = variables, facts, budget, say
        self.rows = []
        self.step = None
        self.children = set()
        # Adapters are of use to one step only.
        self.named = {name: fact for name, fact in facts.items() if not name.startswith("wgpu")}
        # Taken again by the handler of signals, which may come at any time.
        self.lock = threading.RLock()
        self.is_over = self.is_starting = self.is_interrupted = False
        self.file = open(out / "rows.jsonl", "w")
        self.text = scratch / "text.txt"
        write_text(self.text)
        self.started = self.latest = time.monotonic()

    @property
    def is_gpu(self):
        return self.mode == "gpu"

    def remaining(self):
        return self.budget - (time.monotonic() - self.started)

    def do(self, name, step):
        """Does a step. Whatever becomes of it, the next one can be done."""
        self.step, self.latest, before = name, time.monotonic(), len(self.rows)
        if self.remaining() < TOO_LITTLE:
            self.add("", SKIPPED, f"budget: the {self.budget:.0f} s are over")
            return
        try:
            step(self)
            if len(self.rows) == before:
                self.add("", FAILED, "the step says nothing, which is a fault of this script")
        except Skip as reason:
            self.add("", SKIPPED, str(reason))
        except Exception as error:  # noqa: BLE001: what a program prints may be anything.
            self.add("", FAILED, f"{type(error).__name__}: {error}")
        finally:
            self.kill_all()

    def folder(self, *names):
        """Where a command puts what it writes. It goes with the check."""
        return self.scratch.joinpath(self.step, *names)

    def start(self, part, command, limit=None, variables=None):
        """Starts a command, whose limit is that of the step unless one is given, and never more than what is left of the budget."""
        limit = commands.LIMIT[self.step] if limit is None else limit
        left = max(self.remaining(), 0.0)
        environment = dict(os.environ)
        mine = dict(variables or {})
        if command[0].endswith(".py"):
            words = [self.python.path, str(HERE / command[0]), *command[1:]]
            mine["CUDA_VISIBLE_DEVICES"] = self.variables["CUDA_VISIBLE_DEVICES"]
        else:
            program = self.programs / command[0]
            if not program.is_file():
                raise Skip(f"no program {command[0]} in {self.programs}") if not self.is_gpu else FileNotFoundError(
                    f"{program} is not there; make the folder with bench/gpu-check/build, or name another with --programs")
            words = [str(program), *command[1:]]
            mine = {**self.variables, **mine}
        log = self.out / "logs" / f"{self.step} {part}".strip().replace(" ", "-").replace("/", "-").replace(",", "")
        log.parent.mkdir(exist_ok=True)
        with self.lock:
            if self.is_over:
                raise Skip("interrupted")
            self.is_starting = True
            child = Child(words, min(limit, left), environment, mine, log)
            child.outcome.log = str(log.relative_to(self.out))
            child.is_cut = left < limit
            self.children.add(child)
            self.is_starting = False
            if self.is_interrupted:
                self.interrupt()
        return child

    def finish(self, child):
        outcome = child.finish()
        outcome.is_cut = child.is_cut and outcome.timed_out
        with self.lock:
            self.children.discard(child)
        return outcome

    def command(self, part, command, **options):
        return self.finish(self.start(part, command, **options))

    def add(self, part, result, text, figures=None, outcomes=()):
        """A line of the table."""
        now = time.monotonic()
        row = {"step": self.step, "part": part, "result": result, "text": text, "figures": figures or {},
               "seconds": round(now - self.latest, 3), "mode": self.mode, **self.named,
               "commands": [outcome.row() for outcome in outcomes]}
        self.latest = now
        self.rows.append(row)
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        self.say(f"{name_of(row)}: {result}{': ' if text else ''}{text}")

    def kill_all(self):
        """Kills what a step that did not come to its end has left under way."""
        with self.lock:
            children = list(self.children)
            self.children.clear()
        for child in children:
            child.kill()

    def interrupt(self, _number=None, _frame=None):
        """Handles a signal: ends what is under way, starts nothing more, and raises KeyboardInterrupt. A signal that comes while a
        process is started waits for that: nobody would know of it."""
        self.is_interrupted = True
        if not self.is_starting:
            self.end()
            raise KeyboardInterrupt

    def end(self):
        """Ends what is under way, and starts nothing more."""
        with self.lock:
            self.is_over = True
        self.kill_all()


def result_of(outcome):
    """The result of a command by its end alone, and what to say if that is not good."""
    if outcome.timed_out:
        if outcome.is_cut and outcome.limit <= 0:
            return SKIPPED, "budget: no time was left"
        if outcome.is_cut:
            seen = outcome.last_line()
            return CUT, f"budget: cut off after {outcome.seconds:.0f} s" + (f", when it had said: {seen}" if seen else "")
        return TIMED_OUT, outcome.why()
    return (OK, "") if outcome.ok else (FAILED, outcome.why())


def worst(results):
    """The one of several results that stands for all of them."""
    return next((result for result in (FAILED, TIMED_OUT, CUT, SKIPPED) if result in results), OK)


def name_of(row):
    return f"{row['step']} {row['part']}".strip()


def write_text(path, seed=1, size=1 << 20):
    """Text to train on, the same everywhere: sentences of made-up words, some of them much more frequent than others."""
    draw = random.Random(seed)
    syllables = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(2000)]
    weights = [1 / (place + 1) for place in range(len(words))]
    length, pieces = 0, []
    while length < size:
        sentence = " ".join(draw.choices(words, weights, k=draw.randint(4, 14))).capitalize() + ".\n"
        pieces.append(sentence)
        length += len(sentence)
    path.write_text("".join(pieces))


def table(rows):
    """All rows as one table."""
    head = ["step", "result", "figures", "s"]
    cells = [[name_of(row), row["result"], " ".join(row["text"].split()), f"{row['seconds']:.1f}"] for row in rows]
    # The last column of words may be as long as it likes; the seconds stand before it.
    order = [0, 1, 3, 2]
    lines = [[line[place] for place in order] for line in [head, *cells]]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]

    def line_of(line):
        name, result, seconds, text = line
        return f"{name:<{widths[0]}}  {result:<{widths[1]}}  {seconds:>{widths[2]}}  {text}".rstrip()

    return "\n".join([line_of(lines[0]), "-" * (sum(widths) + 4 + 12), *map(line_of, lines[1:])])


def has_failed(rows):
    return any(row["result"] in (FAILED, TIMED_OUT) for row in rows)
