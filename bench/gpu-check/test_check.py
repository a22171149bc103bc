#!/usr/bin/env python3
"""Tests of the check itself: no GPU, no program of ours."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

sys.dont_write_bytecode = True

import check as checks
import commands
import machine
import processes
import steps
from check import FAILED, OK, SKIPPED, TIMED_OUT, Check

HERE = Path(__file__).resolve().parent


class Lacking:
    """A Python without PyTorch."""
    path, has_torch, packages, lacks = sys.executable, False, [], "no PyTorch"


class Scripted(unittest.TestCase):
    """Programs of our own making: shell scripts in a folder."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def program(self, name, script):
        path = self.folder / name
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(0o755)

    def check(self, mode="dry", budget=60.0, facts=None):
        out = self.folder / "out"
        scratch = self.folder / "scratch"
        out.mkdir()
        scratch.mkdir()
        made = Check(mode, out, scratch, self.folder, Lacking(), {"CUDA_VISIBLE_DEVICES": ""}, facts or {"card": None}, budget,
                     say=lambda line: None)
        self.addCleanup(made.file.close)
        return made

    def rows(self, made):
        return [json.loads(line) for line in (made.out / "rows.jsonl").read_text().splitlines()]


class Limits(Scripted):
    def test_what_outlasts_its_limit_is_killed_with_its_children(self):
        # One child in the group, one in a session of its own.
        self.program("slow", "sleep 61.5 & setsid sleep 61.5 & sleep 61.5")
        made = self.check()
        made.step = "devices"
        begin = time.monotonic()
        child = made.start("", ["slow"], limit=1.0)
        child.wait(0.5)
        members = set(child.members())
        self.assertGreaterEqual(len(members), 4)
        outcome = made.finish(child)
        self.assertLess(time.monotonic() - begin, 5)
        self.assertTrue(outcome.timed_out)
        self.assertEqual(checks.result_of(outcome)[0], TIMED_OUT)
        for pid in members:
            self.assertIn(state(pid), (None, "Z"), pid)

    def test_what_is_left_behind_is_a_failure_and_is_killed(self):
        self.program("leaver", "setsid sleep 61.5 >/dev/null 2>&1 &")
        made = self.check()
        made.step = "devices"
        outcome = made.command("", ["leaver"], limit=20)
        self.assertEqual((outcome.code, outcome.timed_out), (0, False))
        result, why = checks.result_of(outcome)
        self.assertEqual(result, FAILED)
        self.assertIn("left behind", why)
        self.assertIn(state(int(outcome.left[0].split()[0])), (None, "Z"))

    def test_a_program_that_is_not_there_is_skipped_in_a_dry_check_and_a_failure_otherwise(self):
        for mode, result in (("dry", SKIPPED), ("gpu", FAILED)):
            with self.subTest(mode), tempfile.TemporaryDirectory() as folder:
                self.folder = Path(folder)
                made = self.check(mode)
                made.do("devices", steps.devices)
                row, = self.rows(made)
                self.assertEqual(row["result"], result)
                self.assertIn("gpt2", row["text"])

    def test_a_program_that_cannot_be_started_is_an_error_in_words(self):
        made = self.check()
        made.step = "devices"
        (self.folder / "broken").write_text("no program")
        outcome = made.command("", ["broken"], limit=5)
        self.assertIn("cannot start", outcome.why())

    def test_when_the_budget_is_over_steps_are_skipped_and_nothing_has_failed(self):
        self.program("gpt2", "sleep 61.5")
        made = self.check(budget=5.0)
        made.do("devices", steps.devices)
        made.do("wgpu", steps.wgpu)
        first, second = self.rows(made)
        self.assertEqual((first["result"], second["result"]), (SKIPPED, SKIPPED))
        self.assertIn("budget: cut off after", first["text"])
        self.assertIn("budget", second["text"])
        self.assertFalse(checks.has_failed(made.rows))

    def test_a_step_that_fails_does_not_stop_the_next(self):
        made = self.check()
        made.do("wgpu", lambda check: 1 / 0)
        made.do("devices", lambda check: check.add("", OK, "well"))
        self.assertEqual([row["result"] for row in self.rows(made)], [FAILED, OK])
        self.assertIn("ZeroDivisionError", self.rows(made)[0]["text"])
        self.assertTrue(checks.has_failed(made.rows))

    def test_a_row_has_the_machine_and_the_commands(self):
        self.program("gpt2", "echo '{}'; exit 3")
        made = self.check(facts={"card": "GPU", "driver": "1", "nccl": "2", "cuda": "13"})
        made.do("devices", steps.devices)
        row, = self.rows(made)
        self.assertEqual((row["card"], row["driver"], row["nccl"], row["cuda"], row["result"]), ("GPU", "1", "2", "13", FAILED))
        command, = row["commands"]
        self.assertEqual((command["exit"], command["command"][1:]), (3, ["devices", "--json"]))
        self.assertTrue(made.out.joinpath(command["log"] + ".out").is_file())


class DeadPeer(Scripted):
    """A launcher of our own, with one rank that can be killed."""

    def verdict(self, afterwards):
        self.program("gpt2", f'COMM_RANK=1 sleep 61.5 &\nrank=$!\nsleep 0.3\necho "step     3/9"\nwait $rank\n{afterwards}\n')
        made = self.check()
        with mock.patch.object(commands, "DEAD_PEER_SECONDS", 2):
            made.do("dead-peer", steps.dead_peer)
        row, = self.rows(made)
        return row["result"], row["text"]

    def test_a_rank_that_names_the_lost_one_and_ends_is_right(self):
        result, text = self.verdict('echo "[rank 0] error: rank 1 was lost: closed" >&2; exit 137')
        self.assertEqual(result, OK, text)
        self.assertIn("rank 1 was lost: closed", text)

    def test_a_rank_that_names_another_is_wrong(self):
        result, text = self.verdict('echo "[rank 0] error: rank 0 was lost" >&2; exit 1')
        self.assertEqual(result, FAILED)
        self.assertIn("no error names rank 1", text)

    def test_a_rank_that_stays_is_wrong(self):
        result, text = self.verdict('echo "error: rank 1 was lost" >&2; sleep 61.5')
        self.assertEqual(result, FAILED)
        self.assertIn("still there 2 s after", text)

    def test_a_rank_that_leaves_something_behind_is_wrong(self):
        result, text = self.verdict('echo "error: rank 1 was lost" >&2; setsid sleep 61.5 & exit 1')
        self.assertEqual(result, FAILED)
        self.assertIn("left behind", text)

    def test_a_run_that_never_trains_is_wrong(self):
        self.program("gpt2", "echo 'error: no device' >&2; exit 1")
        made = self.check()
        made.do("dead-peer", steps.dead_peer)
        row, = self.rows(made)
        self.assertEqual(row["result"], FAILED)
        self.assertIn("before step 3: exit 1: error: no device", row["text"])


def state(pid):
    """A process's state as the kernel names it; None if it is gone."""
    try:
        return re.search(r"^State:\s+(\w)", Path(f"/proc/{pid}/status").read_text(), re.M).group(1)
    except OSError:
        return None


class Outputs(unittest.TestCase):
    def test_conformance(self):
        text = ("running 4 tests\n"
                "test nccl/processes/n=2/all_reduce/f32/sum ... ok\n"
                "test nccl/processes/n=2/barrier            ... FAILED\n"
                "test nccl/processes/n=2/nan/f32            ... ignored (NCCL is not available: no driver (tried x))\n"
                "\ntest result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 9 filtered out; finished in 0.02s\n")
        counts = steps.read_conformance(text)
        self.assertEqual((counts["passed"], counts["failed"], counts["ignored"]), (1, 1, 1))
        self.assertEqual(counts["failures"], ["nccl/processes/n=2/barrier"])
        self.assertEqual(counts["reasons"], ["NCCL is not available: no driver (tried x)"])
        self.assertIsNone(steps.read_conformance("running 4 tests\n"))

    def test_collectives(self):
        figures = {"time_us": 5.0, "min_us": 4.0, "max_us": 6.0, "busbw": 1.0, "wrong": 0, "iters": 3}
        missing = {"missing": "only in place", "failed": False}
        lines = [{"size": 1024, "out_of_place": missing, "in_place": figures}, {"size": 4096, "out_of_place": figures, "in_place": missing},
                 {"size": 8, "out_of_place": missing, "in_place": missing}]
        rows = steps.read_collectives("# machine: x\n{broken\n" + "\n".join(map(json.dumps, lines)))
        self.assertEqual(list(rows), [1024, 4096])
        theirs = {**figures, "time_us": 10.0, "handed_us": 2.0}
        result, text, compared = steps.compare_times(rows[1024], theirs)
        self.assertEqual((result, compared["time_ratio"]), (OK, 0.5))
        self.assertIn("time ours/PyTorch 0.50", text)
        self.assertEqual(steps.compare_times({**rows[1024], "wrong": 7}, theirs)[0], FAILED)
        self.assertEqual(steps.compare_times(rows[1024], None)[0], OK)
        self.assertEqual(steps.compare_times(None, theirs)[0], SKIPPED)

    def test_losses(self):
        compare = lambda losses, weights=("a", "a"), exact=False: steps.compare_losses(
            dict(zip(("tcp", "nccl"), losses)), dict(zip(("tcp", "nccl"), weights)), 1e-4, exact)[0]
        self.assertEqual(compare([[5.0, 4.0], [5.0, 4.0001]]), OK)
        self.assertEqual(compare([[5.0, 4.0], [5.0, 4.001]]), FAILED)
        self.assertEqual(compare([[5.0, 4.0], [5.0]]), FAILED)
        self.assertEqual(compare([[], []]), FAILED)
        self.assertEqual(compare([[4.0, 5.0], [4.0, 5.0]]), FAILED)
        self.assertEqual(compare([[5.0, float("nan")], [5.0, 4.0]]), FAILED)
        self.assertEqual(compare([[5.0, 4.0], [5.0, 4.0]], ("a", "b")), OK)
        self.assertEqual(compare([[5.0, 4.0], [5.0, 4.0]], ("a", "b"), True), FAILED)
        self.assertEqual(compare([[5.0, 4.0], [5.0, 4.0]], (None, None), True), FAILED)

    def test_speed_leaves_out_the_first_steps(self):
        recorded = [{"ms": 1000.0, "loss": 2.0}] * commands.SETTLING + [{"ms": ms, "loss": 1.0} for ms in (100.0, 102.0, 98.0)]
        found = {"cold": {"steps": [{"ms": 30000.0}], "first_step_after_s": 31.0}, "warm": {"steps": recorded, "first_step_after_s": 2.0}}
        figures = steps.speed(found, 8192)
        self.assertEqual((figures["step_ms"], figures["min_ms"], figures["max_ms"]), (100.0, 98.0, 102.0))
        self.assertEqual((figures["tokens_per_s"], figures["cold_first_s"]), (81920.0, 30.0))

    def test_devices(self):
        report = {"features": {"cuda": True}, "cpu": {"name": "x"}, "cuda": {"found": {"driver_version": "13.0", "devices": [
            {"number": 0, "name": "GPU", "compute_capability": "9.0"}]}}, "nccl": {"missing": {"why": "no", "remedy": "install"}},
            "wgpu": {"found": [{"number": 0, "name": "llvmpipe", "kind": "software (CPU)", "unfit": None},
                               {"number": 1, "name": "GPU", "kind": "discrete GPU", "unfit": None}]}}
        found = machine.read_devices(json.dumps(report))
        self.assertEqual((found["card"], found["cuda"], found["nccl"], found["wgpu"]["number"]), ("GPU", "13.0", None, 1))
        self.assertEqual(machine.missing(json.dumps(report), "nccl"), "no; install")
        self.assertIsNone(machine.missing(json.dumps(report), "cuda"))
        for nothing in (None, "", "error"):
            self.assertEqual(machine.read_devices(nothing), {})

    def test_a_refusal_is_one_line(self):
        def refused(stderr, code=1):
            return steps.not_one_error(processes.Outcome([], {}, 1.0, code=code, stderr=stderr), "--device cuda")

        self.assertIsNone(refused("error: --device cuda: no driver; use cpu\n"))
        self.assertIsNone(refused("# machine: x\nerror: --device cuda: no driver; use cpu\n"))
        for stderr, code in (("error: --device cuda: no driver\nmore\n", 1), ("thread 'main' panicked\n", 101), ("error: no driver\n", 1),
                             ("", 1), ("error: --device cuda: no driver\n", 2), ("error: --device cuda: no driver\n", 0)):
            self.assertIsNotNone(refused(stderr, code), (stderr, code))

    def test_a_word_that_an_older_program_does_not_know_is_named(self):
        def lacks(stderr, code):
            return steps.lacks_word(processes.Outcome([], {}, 1.0, code=code, stderr=stderr))

        self.assertEqual(lacks("error: unexpected argument '--device' found\n\nUsage: x\n", 2), "--device")
        self.assertEqual(lacks("error: unrecognized subcommand 'devices'\n", 2), "devices")
        self.assertEqual(lacks("error: invalid value 'wgpu:99' for '--device <DEVICE>'\n", 2), "wgpu:99")
        self.assertIsNone(lacks("error: unrecognized subcommand 'devices'\n", 1))
        self.assertIsNone(lacks("error: --device cuda: no driver\n", 1))

    def test_sizes(self):
        self.assertEqual(steps.sizes_of("1M", "256M", 4), [size << 20 for size in (1, 4, 16, 64, 256)])
        self.assertEqual([steps.size_text(size) for size in (4, 1024, 1 << 20, 3 << 30)], ["4 B", "1 KiB", "1 MiB", "3 GiB"])

    def test_the_text_is_the_same_everywhere(self):
        with tempfile.TemporaryDirectory() as folder:
            first, second = Path(folder, "a"), Path(folder, "b")
            checks.write_text(first, size=5000)
            checks.write_text(second, size=5000)
            self.assertEqual(first.read_bytes(), second.read_bytes())
            self.assertGreaterEqual(first.stat().st_size, 5000)


class Tables(unittest.TestCase):
    def test_columns_stand_below_their_titles(self):
        rows = [{"step": "devices", "part": "", "result": OK, "seconds": 1.25, "text": "a\nGPU"},
                {"step": "all-reduce", "part": "2 rank(s) 64 MiB", "result": TIMED_OUT, "seconds": 100.0, "text": ""}]
        head, line, first, second = checks.table(rows).splitlines()
        place = head.index("result")
        self.assertEqual((first[place:place + 2], second[place:place + 9]), ("ok", "timed out"))
        self.assertTrue(first.endswith("a GPU"))
        self.assertEqual(head.index("figures"), first.index("a GPU"))
        self.assertEqual(set(line), {"-"})

    def test_steps_are_chosen_by_name_and_by_family(self):
        names = list(steps.STEPS)
        self.assertEqual(steps.select(["conformance", "devices"], names), ["devices", "conformance-1", "conformance-2", "conformance-4"])
        self.assertEqual(steps.select(["conformance-2"], names), ["conformance-2"])
        with self.assertRaisesRegex(ValueError, "--only nothing"):
            steps.select(["nothing"], names)

    def test_every_step_says_what_it_does_and_has_a_limit(self):
        for name, step in steps.STEPS.items():
            self.assertTrue(steps.about(step), name)
            self.assertIn(name, commands.LIMIT)


class Program(Scripted):
    """The program itself, as a user starts it."""

    def run_it(self, *words):
        return subprocess.run([sys.executable, str(HERE / "run"), "--programs", str(self.folder), "--out", str(self.folder / "o"), *words],
                              capture_output=True, text=True, timeout=120)

    def test_a_failed_step_gives_exit_code_1(self):
        self.program("gpt2", "echo 'error: no such thing' >&2; exit 1")
        done = self.run_it("--dry", "--only", "devices")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("no such thing", done.stdout)
        self.assertIn("1 failed", (self.folder / "o/table.txt").read_text())
        # It does not write over what is there.
        again = self.run_it("--dry", "--only", "devices")
        self.assertEqual(again.returncode, 2)
        self.assertIn("earlier check", again.stderr)

    def test_nothing_failed_gives_exit_code_0(self):
        self.program("gpt2", """echo '{"features": {"cuda": false}, "cuda": {"missing": {"why": "none", "remedy": "none"}}}'""")
        done = self.run_it("--dry", "--only", "devices")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("1 ok", done.stdout)

    def test_an_interrupt_ends_what_is_under_way_and_prints_the_table(self):
        self.program("gpt2", 'case "$1" in devices) exit 1;; esac; sleep 61.5')
        words = ["--dry", "--only", "dead-peer", "--programs", str(self.folder), "--out", str(self.folder / "o")]
        process = subprocess.Popen([sys.executable, str(HERE / "run"), *words], stdout=subprocess.PIPE, text=True)
        end = time.monotonic() + 30
        while not list(self.folder.glob("o/logs/dead-peer*.err")) and time.monotonic() < end:
            time.sleep(0.05)
        process.terminate()
        text, _ = process.communicate(timeout=30)
        self.assertEqual(process.returncode, 130)
        self.assertIn("interrupted", text)
        marked = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(self.folder / "gpt2").encode() in read(path)]
        self.assertEqual(marked, [])

    def test_what_makes_no_sense_gives_exit_code_2(self):
        self.assertEqual(self.run_it("--only", "devices").returncode, 2)
        self.program("gpt2", "")
        done = self.run_it("--only", "nothing")
        self.assertEqual(done.returncode, 2)
        self.assertIn("choose from devices", done.stderr)
        self.assertEqual(self.run_it("--budget", "0").returncode, 2)


def read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


class Peers(unittest.TestCase):
    def test_command_lines_are_those_that_the_peers_take(self):
        for words in (commands.peer_all_reduce("gpu", 2, [4, 1024]), commands.peer_step("gpu", commands.PEER_MODES, 30)):
            command = [sys.executable, "-B", str(HERE / words[0]), *words[1:], "--help"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
            self.assertEqual(done.returncode, 0, done.stderr)
            # An option that is not known is an error even beside --help only if it comes first; so each is looked for.
            for word in words[1:]:
                if word.startswith("--"):
                    self.assertIn(word + " ", done.stdout)

    def test_libraries_of_python_packages_are_found(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
            for name in ("CUDA_PATH", "COMM_NCCL_LIB", "LD_LIBRARY_PATH"):
                os.environ.pop(name, None)
            packages = Path(folder)
            for below in ("nvidia/cu13/lib", "nvidia/nccl/lib"):
                (packages / below).mkdir(parents=True)
            (packages / machine.NCCL).touch()
            python = Lacking()
            python.packages = [packages]
            python.first = machine.Python.first.__get__(python)
            with mock.patch.object(machine, "USUAL_TOOLKITS", []):
                variables = machine.environment(python, packages / "cache", False)
            self.assertEqual(variables["CUDA_PATH"], str(packages / "nvidia/cu13"))
            self.assertEqual(variables["LD_LIBRARY_PATH"], str(packages / "nvidia/cu13/lib"))
            self.assertEqual(variables["COMM_NCCL_LIB"], str(packages / machine.NCCL))
            self.assertEqual(variables["CUDA_VISIBLE_DEVICES"], os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
            self.assertEqual(machine.environment(python, packages / "cache", True)["CUDA_VISIBLE_DEVICES"], "")


if __name__ == "__main__":
    unittest.main()
