#!/usr/bin/env python3
"""Tests of the check itself: no GPU, no program of ours."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import types
import unittest
from pathlib import Path
from unittest import mock

sys.dont_write_bytecode = True

import check as checks
import commands
import machine
import processes
import steps
import peer_gpt2
from check import CUT, FAILED, OK, SKIPPED, TIMED_OUT, Check

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

    def torch(self, script):
        """A Python with PyTorch that is a script of ours, which gets a peer's name and options."""
        self.program("python-with-torch", script)
        python = Lacking()
        python.path, python.has_torch, python.lacks = str(self.folder / "python-with-torch"), True, None
        return python

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

    def test_when_the_budget_is_over_steps_are_cut_off_or_skipped_and_nothing_has_failed(self):
        self.program("gpt2", "echo 'step 3/20'; echo '{}'; sleep 61.5")
        made = self.check(budget=5.0)
        made.do("devices", steps.devices)
        made.do("wgpu", steps.wgpu)
        first, second = self.rows(made)
        self.assertEqual((first["result"], second["result"]), (CUT, SKIPPED))
        self.assertRegex(first["text"], "budget: cut off after 5 s, when it had said: step 3/20$")
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


    def test_what_had_no_time_at_all_is_skipped_and_not_cut_off(self):
        self.program("slow", "sleep 61.5")
        made = self.check(budget=0.0)
        made.step = "devices"
        self.assertEqual(checks.result_of(made.command("", ["slow"]))[0], SKIPPED)

    def test_the_worst_result_stands_for_all(self):
        self.assertEqual(checks.worst([OK, CUT, FAILED, TIMED_OUT, SKIPPED]), FAILED)
        self.assertEqual(checks.worst([OK, CUT, TIMED_OUT, SKIPPED]), TIMED_OUT)
        self.assertEqual(checks.worst([OK, SKIPPED, CUT]), CUT)
        self.assertEqual(checks.worst([]), OK)


class Conformance(Scripted):
    FAILING = "test nccl/processes/n=2/barrier ... FAILED"

    def verdict(self, lines, ending="", mode="gpu", limit=100, budget=60.0):
        self.program("conformance", f"cat <<'END'\n{lines}\nEND\n{ending}\n")
        made = self.check(mode, budget)
        with mock.patch.dict(commands.LIMIT, {"conformance-2": limit}):
            made.do("conformance-2", steps.conformance(2))
        row, = self.rows(made)
        return row

    def test_a_failed_case_wins_over_a_time_that_is_up(self):
        for limit, budget in ((1, 60.0), (100, 4.0)):
            with self.subTest(limit=limit), tempfile.TemporaryDirectory() as folder:
                self.folder = Path(folder)
                row = self.verdict(f"test a/b ... ok\n{self.FAILING}\ntest a/c    ... ", "sleep 61.5", limit=limit, budget=budget)
                self.assertEqual(row["result"], FAILED)
                for part in ("1 passed, 1 failed, 0 ignored so far: nccl/processes/n=2/barrier; last case a/c",):
                    self.assertIn(part, row["text"])
                self.assertEqual((row["figures"]["passed"], row["figures"]["failed"], row["figures"]["last"]), (1, 1, "a/c"))

    def test_what_was_seen_before_the_end_of_the_budget_or_the_limit_is_shown(self):
        for limit, budget, result, why in ((100, 4.0, CUT, "budget: cut off after 4 s"), (1, 60.0, TIMED_OUT, "killed after 1 s")):
            with self.subTest(result), tempfile.TemporaryDirectory() as folder:
                self.folder = Path(folder)
                row = self.verdict("test a/b ... ok\ntest a/c ... ", "sleep 61.5", limit=limit, budget=budget)
                self.assertEqual(row["result"], result)
                self.assertIn(why, row["text"])
                self.assertIn("1 passed, 0 failed, 0 ignored so far; last case a/c", row["text"])

    def test_a_crash_has_what_was_seen_before(self):
        row = self.verdict("test a/b ... ok\ntest a/c ... ", "echo 'error: lost' >&2; exit 101")
        self.assertEqual(row["result"], FAILED)
        self.assertIn("exit 101: error: lost; 1 passed, 0 failed, 0 ignored so far; last case a/c", row["text"])

    def test_without_nccl_a_gpu_passes_nothing(self):
        whole = "\ntest result: ok. 1 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.02s"
        absent = "test a/b ... ok\ntest a/c ... ignored (NCCL is not available: no driver (tried x))" + whole
        lawful = "test a/b ... ok\ntest a/c ... ignored (a reduction of i16 by NCCL is not available: it has no 16-bit integers)" + whole
        for lines, mode, result in ((absent, "gpu", FAILED), (absent, "dry", OK), (lawful, "gpu", OK)):
            with self.subTest(lines, mode=mode), tempfile.TemporaryDirectory() as folder:
                self.folder = Path(folder)
                row = self.verdict(lines, mode=mode)
                self.assertEqual(row["result"], result, row["text"])
                if result == FAILED:
                    self.assertIn("NCCL is not available: no driver", row["text"])


class AllReduce(Scripted):
    """Programs that print rows of some sizes."""
    ROWS = r"""
for last; do :; done
for size in $(echo "$last" | tr , ' '); do
    case " $ABSENT " in *" $size "*) continue;; esac
    """

    def verdicts(self, absent="", absent_peer="", prefix="", wrong_peer=0, ending=""):
        times = '"time_us": 2.0, "min_us": 1.0, "max_us": 3.0'
        last = self.ROWS.replace("for last; do :; done", 'for word; do [ "$before" = --sizes ] && last=$word; before=$word; done')
        row = f"""echo '{prefix}{{"size": '$size', "in_place": {{{times}, "wrong": 0}}, "handed": null}}'"""
        self.program("all_reduce", f'ABSENT="{absent}"{last}{row}\ndone\n{ending}\n')
        row = f"""echo '{{"size": '$size', {times}, "handed_us": 1.0, "wrong": {wrong_peer}}}'"""
        made = self.check("gpu")
        made.python = self.torch(f'ABSENT="{absent_peer}"{last}{row}\ndone\n')
        with mock.patch.object(commands, "WORLDS", [1]), mock.patch.dict(commands.SIZES, {"gpu": ("1K", "4K", 4)}):
            made.do("all-reduce", steps.all_reduce)
        return {row["part"]: (row["result"], row["text"]) for row in self.rows(made)}

    def test_rows_count_with_and_without_the_name_of_rank_0(self):
        for prefix in ("", "[rank 0] "):
            with self.subTest(prefix), tempfile.TemporaryDirectory() as folder:
                self.folder = Path(folder)
                found = self.verdicts(prefix=prefix)
                self.assertEqual([result for result, _ in found.values()], [OK] * 3, found)
                self.assertIn("time ours/PyTorch 1.00", found["1 rank(s) 4 KiB"][1])

    def test_a_size_without_a_row_has_failed(self):
        found = self.verdicts(absent="1024")
        self.assertEqual({part: result for part, (result, _) in found.items()},
                         {"1 rank(s) 4 B": OK, "1 rank(s) 1 KiB": FAILED, "1 rank(s) 4 KiB": OK})
        self.assertIn("no row of ours", found["1 rank(s) 1 KiB"][1])
        self.assertIn("PyTorch 2.0", found["1 rank(s) 1 KiB"][1])

    def test_all_sizes_without_a_row_have_failed_each(self):
        found = self.verdicts(absent="4 1024 4096", absent_peer="4")
        self.assertEqual([result for result, _ in found.values()], [FAILED] * 3, found)

    def test_a_program_that_fails_is_named_once_and_its_sizes_are_no_verdict(self):
        found = self.verdicts(absent="1024 4096", ending='case "$last" in *1024*) echo "error: lost" >&2; exit 1;; esac')
        self.assertEqual({part: result for part, (result, _) in found.items()},
                         {"1 rank(s)": FAILED, "1 rank(s) 4 B": OK, "1 rank(s) 1 KiB": SKIPPED, "1 rank(s) 4 KiB": SKIPPED})
        self.assertIn("sizes: exit 1: error: lost", found["1 rank(s)"][1])

    def test_a_peer_that_is_wrong_or_silent_has_failed(self):
        found = self.verdicts(wrong_peer=7)
        self.assertEqual([result for result, _ in found.values()], [FAILED] * 3, found)
        self.assertIn("7 wrong elements of PyTorch's", found["1 rank(s) 4 B"][1])
        with tempfile.TemporaryDirectory() as folder:
            self.folder = Path(folder)
            found = self.verdicts(absent_peer="4")
            self.assertEqual([result for result, _ in found.values()], [FAILED, OK, OK], found)


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
        self.assertEqual((counts["is_whole"], counts["last"]), (True, "nccl/processes/n=2/nan/f32"))
        nothing = steps.read_conformance("running 4 tests\n")
        self.assertEqual((nothing["is_whole"], nothing["last"], nothing["passed"]), (False, None, 0))

    def test_conformance_whose_cases_print(self):
        counts = steps.read_conformance("test a ... a word\nFAILED\ntest b ... ok\ntest c ... a word\n")
        self.assertEqual((counts["failures"], counts["passed"], counts["last"], counts["is_whole"]), (["a"], 1, "c", False))

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
        self.assertEqual(steps.compare_times(rows[1024], {**theirs, "wrong": 1})[0], FAILED)

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

    def test_what_was_cut_off_is_counted_apart_and_is_no_failure(self):
        self.program("gpt2", 'case "$1" in devices) exit 1;; esac; echo "step 1/5"; sleep 61.5')
        done = self.run_it("--dry", "--only", "dead-peer", "--budget", "4")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("step 1/5", done.stdout)
        self.assertRegex((self.folder / "o/table.txt").read_text(), r"\n1 cut off, \d+ s\n$")

    def test_a_python_that_cannot_be_run_gives_exit_code_2(self):
        self.program("gpt2", "exit 1")
        self.program("no-python", "echo hello")
        (self.folder / "no-program").write_text("")
        for name in ("nothing", "no-python", "no-program", "."):
            done = self.run_it("--dry", "--only", "devices", "--python", str(self.folder / name))
            self.assertEqual(done.returncode, 2, done.stdout)
            self.assertIn(f"--python {self.folder / name}: this cannot be run", done.stderr)
            # The same command with another one finds no earlier check.
            self.assertFalse((self.folder / "o").exists())
        self.assertEqual(self.run_it("--dry", "--only", "devices", "--python", "").returncode, 2)

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

    def test_an_exception_is_a_failed_row_with_its_message(self):
        class OutOfMemoryError(RuntimeError):
            pass

        def measure(_torch, _args, mode):
            if mode == "f32":
                raise OutOfMemoryError("CUDA out of memory.\nTried to allocate 9 GiB")
            return {"mode": mode}

        torch = types.SimpleNamespace(__version__="2")
        said = io.StringIO()
        words = ["peer_gpt2.py", "--device", "cpu", "--modes", "f32,bf16,bf16-compiled"]
        with mock.patch.dict(sys.modules, torch=torch), mock.patch.object(peer_gpt2, "measure", measure), \
                mock.patch.object(sys, "argv", words), mock.patch.object(peer_gpt2.shutil, "which", lambda _: None), \
                contextlib.redirect_stdout(said):
            peer_gpt2.main()
        rows = processes.json_lines(said.getvalue())[1:]
        self.assertEqual(rows[0], {"mode": "f32", "failed": "OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB"})
        self.assertEqual(rows[1], {"mode": "bf16"})
        self.assertIn("no C compiler", rows[2]["left_out"])

    def test_a_peer_without_pytorch_says_so_in_its_last_line(self):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "torch.py").write_text("raise OSError('libcudart.so is\\nmissing')")
            for words in (["peer_gpt2.py", "--device", "cpu"], ["peer_nccl.py", "--device", "cpu", "--world", "1"]):
                done = subprocess.run([sys.executable, "-B", str(HERE / words[0]), *words[1:]], capture_output=True, text=True, timeout=30,
                                      env={**os.environ, "PYTHONPATH": folder})
                self.assertEqual(done.returncode, 1)
                self.assertRegex(done.stderr.splitlines()[-1], "^error: (rank 0: )?OSError: libcudart.so is missing$")


class PeerRows(Scripted):
    """What becomes of the rows of a step's peer."""

    def verdicts(self, script):
        made = self.check("gpu")
        made.python = self.torch(script)
        made.do("step-time", lambda check: steps.peer_steps(check, {"f32": 100.0}))
        return {row["part"]: (row["result"], row["text"]) for row in self.rows(made)}

    def test_a_mode_that_failed_has_failed_with_its_message(self):
        good = '{"mode": "%s", "tokens_per_s": 50.0, "step_ms": 2.0, "min_ms": 1.0, "max_ms": 3.0, "last_loss": %s}'
        lines = ['{"mode": "f32", "failed": "OutOfMemoryError: CUDA out of memory"}', good % ("tf32", "4.0"), good % ("bf16", "NaN"),
                 '{"mode": "bf16-compiled", "left_out": "no C compiler"}']
        found = self.verdicts("cat <<'END'\n" + "\n".join(lines) + "\nEND\n")
        self.assertEqual(found["PyTorch f32"], (FAILED, "OutOfMemoryError: CUDA out of memory"))
        self.assertEqual([found["PyTorch " + mode][0] for mode in ("tf32", "bf16", "bf16-compiled")], [OK, FAILED, SKIPPED])
        self.assertIn("time ours/PyTorch 0.50", found["PyTorch tf32"][1])

    def test_a_peer_that_ends_with_an_error_has_failed_whatever_it_printed(self):
        lines = "".join(f"echo '{{\"mode\": \"{mode}\", \"left_out\": \"late\"}}'\n" for mode in commands.PEER_MODES)
        found = self.verdicts(lines + "echo 'error: RuntimeError: lost' >&2; exit 1")
        self.assertEqual(found["PyTorch"], (FAILED, "exit 1: error: RuntimeError: lost"))


class Libraries(unittest.TestCase):
    """Where NVIDIA's libraries and headers are found."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.packages, self.usual = self.folder / "site-packages", self.folder / "usual"
        self.wheel = self.packages / "nvidia/cu13"
        patches = mock.patch.dict(os.environ), mock.patch.object(machine, "USUAL_TOOLKITS", [str(self.usual / "cuda*")])
        for patch in patches:
            patch.start()
            self.addCleanup(patch.stop)
        for name in ("CUDA_PATH", "COMM_NCCL_LIB", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES"):
            os.environ.pop(name, None)

    def files(self, folder, *names):
        for name in names:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def headers(self, toolkit):
        self.files(toolkit / "include", *machine.HEADERS[:5])
        self.files(toolkit / "include/cccl", *machine.HEADERS[5:])

    def variables(self, is_dry=False):
        python = Lacking()
        python.packages = [self.packages]
        python.first = machine.Python.first.__get__(python)
        return machine.environment(python, self.folder / "scratch", is_dry)

    def test_the_headers_are_those_that_the_programs_probe(self):
        source = HERE / "../../gpt2/src/devices/cuda.rs"
        if not source.is_file():
            self.skipTest("no sources here")
        for name in ("HEADERS", "INCLUDES"):
            listed = re.search(rf"const {name}: \[&str; \d+\] =\s*\[(.*?)\]", source.read_text(), re.S).group(1)
            self.assertEqual(getattr(machine, name), re.findall('"(.*?)"', listed))

    def test_the_library_of_cuda_13_packages_is_linked_by_a_name_that_programs_know(self):
        self.files(self.wheel / "lib", "libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libnvrtc.alt.so.13")
        os.environ["LD_LIBRARY_PATH"] = "/elsewhere"
        # Twice, as a folder may be there already.
        self.variables()
        links = self.folder / "scratch/nvrtc"
        self.assertEqual(self.variables()["LD_LIBRARY_PATH"], f"{links}:/elsewhere")
        self.assertEqual((links / "libnvrtc.so").resolve(), (self.wheel / "lib/libnvrtc.so.13").resolve())
        self.assertEqual((links / "libnvrtc-builtins.so.13.0").resolve(), (self.wheel / "lib/libnvrtc-builtins.so.13.0").resolve())

    def test_the_newest_of_several_is_linked(self):
        self.files(self.wheel / "lib", "libnvrtc.so.13.9", "libnvrtc.so.13.10", "libnvrtc.so.9")
        self.variables()
        self.assertEqual((self.folder / "scratch/nvrtc/libnvrtc.so").resolve().name, "libnvrtc.so.13.10")

    def test_a_toolkit_comes_before_packages_and_before_what_else_is_searched(self):
        self.files(self.wheel / "lib", "libnvrtc.so.13", "libnvrtc-builtins.so.13.0")
        self.files(self.usual, "cuda-12.8/lib64/libnvrtc.so.12", "cuda-12.10/lib64/libnvrtc.so", "cuda-13.0/lib64/libnvrtc.so.13")
        os.environ["LD_LIBRARY_PATH"] = str(self.wheel / "lib")
        self.assertEqual(self.variables()["LD_LIBRARY_PATH"], f"{self.usual}/cuda-12.10/lib64:{self.wheel}/lib")
        self.assertFalse((self.folder / "scratch/nvrtc").exists())
        self.files(self.usual, "cuda/lib64/libnvrtc.so.12")
        self.assertEqual(self.variables()["LD_LIBRARY_PATH"], f"{self.usual}/cuda/lib64:{self.wheel}/lib")
        os.environ["CUDA_PATH"] = str(self.usual / "cuda-12.8")
        self.assertEqual(self.variables()["LD_LIBRARY_PATH"], f"{self.usual}/cuda-12.8/lib64:{self.wheel}/lib")

    def test_what_the_user_names_stays_the_users_choice(self):
        self.files(self.usual, "cuda/lib64/libnvrtc.so")
        self.files(self.folder, "other/libnvrtc-builtins.so.12.9", "mine/libnvrtc.so.12")
        os.environ["LD_LIBRARY_PATH"] = f"{self.folder}/other:{self.folder}/mine"
        self.assertEqual(self.variables()["LD_LIBRARY_PATH"], f"{self.folder}/mine:{self.folder}/other")

    def test_only_a_folder_with_all_headers_is_a_toolkit(self):
        self.headers(self.wheel)
        self.headers(self.usual / "cuda")
        self.assertEqual(self.variables()["CUDA_PATH"], str(self.usual / "cuda"))
        (self.usual / "cuda/include/cccl/nv/target").unlink()
        self.assertEqual(self.variables()["CUDA_PATH"], str(self.wheel))
        for header in machine.HEADERS:
            path = next(self.wheel.glob("include/" + header), None) or self.wheel / "include/cccl" / header
            path.unlink()
            self.assertNotIn("CUDA_PATH", self.variables(), header)
            path.touch()
        os.environ["CUDA_PATH"] = "/mine"
        self.assertNotIn("CUDA_PATH", self.variables())

    def test_headers_are_of_the_version_of_nvrtc(self):
        self.headers(self.wheel)
        self.headers(self.usual / "cuda")
        self.files(self.wheel / "lib", "libnvrtc.so.13")
        self.assertEqual(self.variables()["CUDA_PATH"], str(self.wheel))
        self.files(self.usual / "cuda-12.8/lib64", "libnvrtc.so")
        self.headers(self.usual / "cuda-12.8")
        self.assertEqual(self.variables()["CUDA_PATH"], str(self.usual / "cuda-12.8"))

    def test_nothing_that_is_there_sets_nothing(self):
        self.assertEqual(set(self.variables()), {"XDG_CACHE_HOME", "CUDA_CACHE_PATH", "CUDA_VISIBLE_DEVICES"})

    def test_nccl_is_that_of_the_packages(self):
        self.files(self.packages, machine.NCCL)
        self.assertEqual(self.variables()["COMM_NCCL_LIB"], str(self.packages / machine.NCCL))

    def test_the_device_is_the_users_first_one(self):
        self.assertEqual(self.variables()["CUDA_VISIBLE_DEVICES"], "0")
        for wanted, first in (("3,4", "3"), ("", ""), ("GPU-1", "GPU-1")):
            os.environ["CUDA_VISIBLE_DEVICES"] = wanted
            self.assertEqual(self.variables()["CUDA_VISIBLE_DEVICES"], first)
            self.assertEqual(self.variables(is_dry=True)["CUDA_VISIBLE_DEVICES"], "")


if __name__ == "__main__":
    unittest.main()
