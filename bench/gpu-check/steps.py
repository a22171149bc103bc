"""The steps: what each runs, and how it judges what came out."""

import json
import math
import os
import re
import signal
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import commands
import machine
from check import CUT, FAILED, OK, SKIPPED, Skip, result_of, worst
from processes import is_noise, json_lines, variable


def devices(check):
    """Runs `gpt2 devices`; on a GPU nothing that CUDA or NCCL needs may be missing."""
    outcome = check.command("", commands.devices())
    result, why = result_of(outcome)
    if not check.is_gpu and lacks_word(outcome):
        raise Skip(f"this gpt2 knows no {lacks_word(outcome)}")
    if result != OK:
        return check.add("", result, why, outcomes=[outcome])
    found = machine.read_devices(outcome.stdout)
    if not found:
        return check.add("", FAILED, "gpt2 devices --json printed no JSON object", outcomes=[outcome])
    lacks = {part: machine.missing(outcome.stdout, part) for part in ("cuda", "nvrtc", "cuda_headers", "nccl")}
    lacks = {part: why for part, why in lacks.items() if why}
    if check.is_gpu and lacks:
        text = "missing: " + "; ".join(f"{part}: {why}" for part, why in lacks.items())
        return check.add("", FAILED, text, found, [outcome])
    named = [("card", "card"), ("CUDA", "cuda"), ("NVRTC", "nvrtc"), ("NCCL", "nccl")]
    there = [f"{name} {found[key]}" for name, key in named if found[key]]
    has = [name for name, there in (found["features"] or {}).items() if there]
    there.append(f"features {', '.join(has) or 'none'}")
    if lacks:
        there.append(f"missing as it should be without a GPU: {', '.join(lacks)}")
    check.add("", OK, "; ".join(there), found, [outcome])


def conformance(ranks):
    """Runs the conformance suite with every rank as a process on the same GPU; without a GPU every case must be ignored, with a reason."""

    def step(check):
        outcome = check.command("", commands.conformance(ranks), variables=commands.SHARED_GPU)
        counts = read_conformance(outcome.stdout)
        result, why = result_of(outcome)
        if result == CUT:
            # The last case says more than the last line.
            why = f"budget: cut off after {outcome.seconds:.0f} s"
        text = f"{counts['passed']} passed, {counts['failed']} failed, {counts['ignored']} ignored"
        if not counts["is_whole"]:
            text += " so far"
        absent = [reason for reason in counts["reasons"] if re.search(ABSENT, reason)] if check.is_gpu else []
        if counts["failures"]:
            text += f": {', '.join(counts['failures'][:5])}"
        elif absent or counts["passed"] == 0 and counts["reasons"]:
            text += f": {(absent or counts['reasons'])[0]}"
        if not counts["is_whole"] and counts["last"]:
            text += f"; last case {counts['last']}"
        # A summary with failures says why the program did not end well; nothing else does.
        if why and not (counts["is_whole"] and counts["failed"] and result == FAILED and not outcome.left):
            text = f"{why}; {text}"
        if result == OK and not counts["is_whole"]:
            result, text = FAILED, f"no test result in the output; {text}"
        elif result == OK and check.is_gpu and counts["passed"] == 0:
            result = FAILED
        elif result == OK and not check.is_gpu and (counts["ignored"] == 0 or not counts["reasons"]):
            result, text = FAILED, text + "; without a GPU all are to be ignored, with the reason"
        if counts["failed"] or absent:
            # However the program ended.
            result = FAILED
        check.add("", result, text, counts, [outcome])

    return step


# A reason for which no case may be ignored on a machine with a GPU. That NCCL has no such operation is another.
ABSENT = r"(?:^|[:;(]\s*)(?:NCCL|CUDA|the (?:CUDA )?driver) is not available"


def read_conformance(text):
    """Counts, names of failures, reasons of what was ignored, the last case that was begun, and whether the output is whole."""
    verdicts = {"ok": 0, "FAILED": 0, "ignored": 0}
    failures, reasons = [], []
    heads = list(re.finditer(r"^test (\S+) +\.\.\.(?: |$)", text, re.M))
    for head, following in zip(heads, [*heads[1:], None]):
        # What a case prints itself may stand before its verdict.
        verdict = re.compile(r"^(ok|FAILED|ignored)(?: \((.+)\))?$", re.M).search(text[head.end():following and following.start()])
        if verdict:
            verdicts[verdict.group(1)] += 1
            if verdict.group(1) == "FAILED":
                failures.append(head.group(1))
            if verdict.group(2):
                reasons.append(verdict.group(2))
    end = re.search(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored", text, re.M)
    passed, failed, ignored = (int(number) for number in end.groups()) if end else verdicts.values()
    # The most frequent first.
    reasons = sorted(set(reasons), key=reasons.count, reverse=True)
    return {"passed": passed, "failed": failed, "ignored": ignored, "failures": failures, "reasons": reasons,
            "last": heads[-1].group(1) if heads else None, "is_whole": end is not None}


def dead_peer(check):
    """Kills one of two ranks during training: the other must end soon with an error that names it, and leave no process behind."""
    out = check.folder()
    child = check.start("", commands.dead_peer(check.mode, out, check.text), variables=commands.SHARED_GPU)
    is_under_way = until(child, rf"step +{commands.DEAD_PEER_STEPS}/")
    victims = [pid for pid, variables in child.members().items()
               if variable(variables, "COMM_RANK") == str(commands.DEAD_PEER_VICTIM)]
    if is_under_way and victims:
        began, killed = child.seconds(), time.monotonic()
        # However late it is, the other rank has its time.
        child.outcome.limit = began + commands.DEAD_PEER_SECONDS + 1
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        has_ended = child.wait(commands.DEAD_PEER_SECONDS)
        took = time.monotonic() - killed
        if not has_ended:
            child.kill()
    outcome = check.finish(child)
    if not is_under_way or not victims:
        result, why = result_of(outcome)
        why = why or "the run ended by itself"
        return check.add("", result if result != OK else FAILED, f"before step {commands.DEAD_PEER_STEPS}: {why}", outcomes=[outcome])
    said = re.search(rf"error: (.*rank {commands.DEAD_PEER_VICTIM} was lost.*)", outcome.stdout + outcome.stderr)
    figures = {"first_steps_s": began, "end_s": took, "said": said and said.group(1), "left": outcome.left}
    faults = []
    if not has_ended:
        faults.append(f"still there {commands.DEAD_PEER_SECONDS} s after rank {commands.DEAD_PEER_VICTIM} was killed")
    elif outcome.code == 0:
        faults.append("exit code 0")
    if not said:
        faults.append(f"no error names rank {commands.DEAD_PEER_VICTIM}: {outcome.last_words()}")
    if outcome.left:
        faults.append(f"left behind: {', '.join(outcome.left)}")
    text = "; ".join(faults) or f"ended {took:.2f} s after the kill, exit {outcome.code}, nothing left: {said.group(1)}"
    check.add("", FAILED if faults else OK, text, figures, [outcome])


def until(child, pattern):
    """Waits for a text in a command's output; whether it has come."""
    pattern = re.compile(pattern)
    while True:
        has_ended = child.wait(0.05)
        if pattern.search(child.out.read_text(errors="replace")):
            return True
        if has_ended or child.seconds() >= child.outcome.limit:
            return False


def strategies(check):
    """Trains with each strategy over each transport; the losses must not depend on the transport."""
    transports = commands.TRANSPORTS[check.mode]
    # Only losses are compared, so runs may share the machine where it is large.
    side_by_side = max(1, min(len(transports), (os.cpu_count() or 1) // 4))
    finals = {}
    for name in commands.STRATEGIES:

        def run(transport):
            out = check.folder(name, transport)
            command = commands.strategy(check.mode, name, transport, out, check.text)
            outcome = check.command(f"{name} {transport}", command, variables=commands.SHARED_GPU)
            return transport, outcome, read_steps(out), read_weights(outcome.stdout)

        with ThreadPoolExecutor(side_by_side) as pool:
            runs = list(pool.map(run, transports))
        outcomes = [outcome for _, outcome, _, _ in runs]
        bad = [(transport, *result_of(outcome)) for transport, outcome, _, _ in runs if not outcome.ok]
        if bad:
            text = "; ".join(f"{transport}: {why}" for transport, _, why in bad)
            check.add(name, worst([result for _, result, _ in bad]), text, outcomes=outcomes)
            continue
        losses = {transport: [step["loss"] for step in steps] for transport, _, steps, _ in runs}
        weights = {transport: digest for transport, _, _, digest in runs}
        result, text, figures = compare_losses(losses, weights, commands.PARITY[check.mode], is_exact=not check.is_gpu)
        finals[name] = losses[transports[0]][-1] if losses[transports[0]] else math.nan
        figures["across_strategies"] = spread(list(finals.values()))
        check.add(name, result, text, figures, outcomes)


def compare_losses(losses, weights, bound, is_exact):
    """Whether every transport learnt the same: (result, words, figures)."""
    names = list(losses)
    first = losses[names[0]]
    figures = {"losses": losses, "weights": weights, "bound": bound}
    lengths = {name: len(each) for name, each in losses.items()}
    if not first or len(set(lengths.values())) != 1:
        return FAILED, f"steps recorded: {lengths}", figures
    if not all(math.isfinite(loss) for each in losses.values() for loss in each):
        return FAILED, "a loss is not finite", figures
    if not first[-1] < first[0]:
        return FAILED, f"the loss went from {first[0]:.4f} to {first[-1]:.4f}; it should fall", figures
    apart = {name: max(abs(a - b) / abs(b) for a, b in zip(each, first)) for name, each in losses.items() if name != names[0]}
    figures["difference"] = apart
    same_weights = len(set(weights.values())) == 1 and None not in weights.values()
    worst = max(apart.values(), default=0.0)
    text = (f"loss {first[0]:.4f} to {first[-1]:.4f}; {', '.join(names)} apart by {worst:.1e} at most (bound {bound:.0e}), "
            f"weights {'equal' if same_weights else 'not equal'}")
    good = worst <= bound and (same_weights or not is_exact)
    return (OK if good else FAILED), text, figures


def spread(values):
    """Largest relative difference to the first one."""
    return max((abs(value - values[0]) / abs(values[0]) for value in values), default=0.0)


def read_steps(out):
    """The steps that a run recorded, without validations."""
    path = Path(out) / "steps.jsonl"
    lines = json_lines(path.read_text()) if path.is_file() else []
    return [line for line in lines if "loss" in line and "ms" in line]


def read_weights(text):
    found = re.search(r"weights: sha256 ([0-9a-f]{64})", text)
    return found and found.group(1)


def all_reduce(check):
    """Times all-reduce on GPU buffers, here and in PyTorch."""
    smallest, largest, factor = commands.SIZES[check.mode]
    for ranks in commands.WORLDS:
        variables = commands.SHARED_GPU
        ours, outcomes, silent, refused = {}, [], set(), []
        # Without data first: what an operation costs its host.
        pieces = [[commands.OVERHEAD_BYTES], sizes_of(smallest, largest, factor)]
        for part, piece in zip(("overhead", "sizes"), pieces):
            command = commands.all_reduce(check.mode, ranks, piece)
            outcome = check.command(f"{ranks} ranks {part}", command, variables=variables)
            outcomes.append(outcome)
            ours.update(read_collectives(outcome.stdout))
            result, why = result_of(outcome)
            if result != OK:
                refused.append((result, f"{part}: {why}"))
            elif check.is_gpu:
                silent.update(size for size in piece if size not in ours)
        if refused:
            text = "; ".join(why for _, why in refused)
            check.add(f"{ranks} rank(s)", worst([result for result, _ in refused]), text, {"ours": list(ours.values())}, outcomes)
        sizes = sorted({*ours, *(size for piece in pieces for size in piece)})
        theirs, peer = {}, (SKIPPED, check.python.lacks)
        if check.python.has_torch:
            command = commands.peer_all_reduce(check.mode, ranks, sizes)
            outcome = check.command(f"{ranks} ranks peer", command, limit=commands.LIMIT["all-reduce peer"], variables=variables)
            outcomes.append(outcome)
            theirs = {row["size"]: row for row in json_lines(outcome.stdout) if "time_us" in row}
            peer = result_of(outcome)
        if peer[0] != OK:
            check.add(f"{ranks} rank(s) PyTorch", *peer, outcomes=outcomes)
        for size in sizes:
            lacks = ["no row of ours, although the program ended without an error"] if size in silent else []
            if peer[0] == OK and size not in theirs:
                lacks.append("no row of PyTorch's, although the peer ended without an error")
            if lacks or size in ours or size in theirs:
                result, text, figures = compare_times(ours.get(size), theirs.get(size))
                check.add(f"{ranks} rank(s) {size_text(size)}", FAILED if lacks else result, ", ".join([*lacks, *filter(None, [text])]),
                          figures, outcomes)
        if not ours and not silent and not refused:
            check.add(f"{ranks} rank(s)", FAILED, "no rows came out", outcomes=outcomes)


def read_collectives(text):
    """Rows of `all_reduce` and of `bench collectives --json` by size: in place if that was measured, as PyTorch does it."""
    rows = {}
    for row in json_lines(text):
        figures = next((row[place] for place in ("in_place", "out_of_place") if "time_us" in (row.get(place) or {})), None)
        if figures:
            kept = {name: figures.get(name) for name in ("time_us", "min_us", "max_us", "busbw", "wrong", "iters")}
            handed = (row.get("handed") or {}).get("time_us")
            rows[row["size"]] = {"size": row["size"], **kept, **({"handed_us": handed} if handed is not None else {})}
    return rows


def compare_times(ours, theirs):
    """Ours beside the peer's: (result, words, figures)."""
    times = lambda row: f"{row['time_us']:,.1f} µs ({row['min_us']:,.1f} to {row['max_us']:,.1f})"
    figures = {"ours": ours, "peer": theirs}
    words, result = [], OK if ours else SKIPPED
    if ours:
        handed = f", {ours['handed_us']:,.1f} µs to hand over" if "handed_us" in ours else ""
        words.append(f"ours {times(ours)}{handed}")
        if ours["wrong"]:
            result = FAILED
            words.append(f"{ours['wrong']} wrong elements")
    if theirs:
        words.append(f"PyTorch {times(theirs)}, {theirs['handed_us']:,.1f} µs to hand over")
        if theirs.get("wrong"):
            result = FAILED
            words.append(f"{theirs['wrong']} wrong elements of PyTorch's")
    if ours and theirs:
        figures["time_ratio"] = ours["time_us"] / theirs["time_us"]
        words.append(f"time ours/PyTorch {figures['time_ratio']:.2f}")
    return result, ", ".join(words), figures


def sizes_of(smallest, largest, factor):
    size, end, sizes = in_bytes(smallest), in_bytes(largest), []
    while size <= end:
        sizes.append(size)
        size *= factor
    return sizes


def in_bytes(text):
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def size_text(size):
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def step_time(check):
    """Times a training step on one device with an empty kernel cache, with a filled one, and in PyTorch."""
    sizes = commands.STEP[check.mode]
    ours = {}
    for precision in commands.PRECISIONS:
        # Kernels of one precision are no help to the other, and must not be.
        kernels = machine.kernels_in(check.folder(precision, "kernels"))
        outcomes, found = [], {}
        for heat, steps in (("cold", sizes["cold"]), ("warm", sizes["warm"])):
            out = check.folder(precision, heat)
            child = check.start(f"{precision} {heat}", commands.step(check.mode, precision, steps, out, check.text), variables=kernels)
            first = child.seconds() if until(child, r"step +1/") else None
            outcome = check.finish(child)
            outcomes.append(outcome)
            found[heat] = {"first_step_after_s": first, "steps": read_steps(out)}
            if not outcome.ok:
                break
        result, why = result_of(outcomes[-1])
        if result != OK:
            check.add(f"gpt2 {precision}", result, f"{heat}: {why}", found, outcomes)
            continue
        figures = speed(found, sizes["batch"] * sizes["length"])
        ours[precision] = figures["tokens_per_s"]
        text = (f"{figures['tokens_per_s']:,.0f} tokens/s, {figures['step_ms']:.1f} ms ({figures['min_ms']:.1f} to "
                f"{figures['max_ms']:.1f}); first step cold {figures['cold_first_s']:.2f} s, warm {figures['warm_first_s']:.2f} s; "
                f"from the start {figures['cold_after_s']:.1f} s, {figures['warm_after_s']:.1f} s")
        is_sound = all(math.isfinite(step["loss"]) for step in found["warm"]["steps"])
        check.add(f"gpt2 {precision}", OK if is_sound else FAILED, text if is_sound else "a loss is not finite", figures, outcomes)
    peer_steps(check, ours)


def speed(found, tokens):
    """Figures of a cold and a warm run."""
    steps = found["warm"]["steps"]
    times = sorted(step["ms"] for step in steps[commands.SETTLING:])
    middle = statistics.median(times)
    return {"tokens_per_s": tokens / middle * 1e3, "step_ms": middle, "min_ms": times[0], "max_ms": times[-1],
            "cold_first_s": found["cold"]["steps"][0]["ms"] / 1e3, "warm_first_s": steps[0]["ms"] / 1e3,
            "cold_after_s": found["cold"]["first_step_after_s"], "warm_after_s": found["warm"]["first_step_after_s"],
            "losses": [step["loss"] for step in steps], "parts": steps[-1].get("parts"),
            "gpu_memory_bytes": max((step.get("gpu_memory_bytes") or 0 for step in steps), default=0)}


def peer_steps(check, ours):
    if check.python.lacks:
        return check.add("PyTorch", SKIPPED, check.python.lacks)
    limit = commands.LIMIT["step-time peer"]
    # A mode that begins late would only be cut off.
    seconds = max(1.0, min(limit, check.remaining()) - commands.COMPILE_SECONDS)
    modes = commands.PEER_MODES if check.is_gpu else [mode for mode in commands.PEER_MODES if "compiled" not in mode]
    outcome = check.command("PyTorch", commands.peer_step(check.mode, modes, seconds), limit=limit)
    rows = {row["mode"]: row for row in json_lines(outcome.stdout) if "mode" in row}
    result, why = result_of(outcome)
    absent = [mode for mode in modes if mode not in rows]
    if absent or result != OK:
        part = " ".join(["PyTorch", *(absent if rows else [])])
        check.add(part, result if result != OK else FAILED, why or "no row came out", outcomes=[outcome])
    for mode, row in rows.items():
        if "left_out" in row:
            check.add(f"PyTorch {mode}", SKIPPED, row["left_out"], row, [outcome])
        elif "failed" in row:
            check.add(f"PyTorch {mode}", FAILED, row["failed"], row, [outcome])
        else:
            text = f"{row['tokens_per_s']:,.0f} tokens/s, {row['step_ms']:.1f} ms ({row['min_ms']:.1f} to {row['max_ms']:.1f})"
            mine = ours.get("bf16" if mode.startswith("bf16") else "f32")
            if mine:
                row["time_ratio"] = row["tokens_per_s"] / mine
                text += f"; time ours/PyTorch {row['time_ratio']:.2f}"
            is_sound = math.isfinite(row.get("last_loss", 0.0))
            check.add(f"PyTorch {mode}", OK if is_sound else FAILED, text if is_sound else "a loss is not finite", row, [outcome])


def wgpu(check):
    """Trains a few steps through Vulkan on the GPU; without a GPU on software Vulkan, if there is any."""
    adapter = check.facts.get("wgpu" if check.is_gpu else "wgpu_software")
    if not adapter:
        raise Skip("no Vulkan adapter here but software" if check.facts.get("wgpu_software") else "no Vulkan adapter here")
    out = check.folder()
    outcome = check.command("", commands.wgpu(adapter["number"], out, check.text))
    losses = [step["loss"] for step in read_steps(out)]
    result, why = result_of(outcome)
    if result == OK and not (losses and all(map(math.isfinite, losses)) and losses[-1] < losses[0]):
        result, why = FAILED, f"losses {losses}"
    text = why or f"loss {losses[0]:.4f} to {losses[-1]:.4f} on {adapter['name']}"
    check.add("", result, text, {"losses": losses, "adapter": adapter}, [outcome])


def command_lines(check):
    """Without a GPU: every command line of the real check must be accepted, and then end because there is no GPU."""
    for program in ("gpt2", "all_reduce"):
        outcomes, faults, cut, unknown, count = [], [], [], None, 0
        for name, command in commands.every_gpu_command(check.folder(), check.text):
            if command[0] != program:
                continue
            count += 1
            outcome = check.command(name, command, limit=commands.LIMIT["refusal"], variables=commands.SHARED_GPU)
            outcomes.append(outcome)
            if lacks_word(outcome):
                unknown = lacks_word(outcome)
                continue
            result, why = result_of(outcome)
            if result in (CUT, SKIPPED):
                cut.append((result, f"{name}: {why}"))
                continue
            why = not_one_error(outcome, r"--device|--transport|nccl")
            if why:
                faults.append(f"{name}: {why}")
        if unknown:
            check.add(program, SKIPPED, f"this {program} knows no {unknown}", outcomes=outcomes)
        else:
            result = FAILED if faults else worst([result for result, _ in cut])
            text = f"{count - len(cut)} of {count} accepted; {cut[0][1]}" if cut else f"{count} accepted"
            check.add(program, result, "; ".join(faults) or text, outcomes=outcomes)


def refusals(check):
    """Without a GPU: commands that need one must end with one clear error, and no panic."""
    features = check.facts.get("features") or {}
    for name, command, variables, names, without in commands.refusals(check.folder(), check.text):
        feature = re.search("`(.*)`", without).group(1)
        outcome = check.command(name, command, limit=commands.LIMIT["refusal"], variables=variables)
        if lacks_word(outcome):
            check.add(name, SKIPPED, f"this gpt2 knows no {lacks_word(outcome)}", outcomes=[outcome])
            continue
        result, why = result_of(outcome)
        if result in (CUT, SKIPPED):
            check.add(name, result, why, outcomes=[outcome])
            continue
        why = not_one_error(outcome, re.escape(names if features.get(feature) else without))
        check.add(name, FAILED if why else OK, why or outcome.last_words(), outcomes=[outcome])


def lacks_word(outcome):
    """The word of a command that the program does not know, being older than it; None if it knows all. A check on a GPU fails then."""
    unknown = r"^error: (?:unexpected argument|unrecognized subcommand|invalid value) '(\S+)'"
    found = re.search(unknown, outcome.stderr, re.M) if outcome.code == 2 else None
    return found and found.group(1)


def not_one_error(outcome, pattern):
    """What is wrong with a refusal; None if it is one line that begins with `error:` and has the pattern in it."""
    lines = [line for line in outcome.stderr.splitlines() if line.strip() and not is_noise(line) and not line.startswith("#")]
    if outcome.timed_out or outcome.left:
        return outcome.why()
    if outcome.code != 1:
        return f"exit {outcome.code} instead of 1: {outcome.last_words()}"
    if len(lines) != 1 or not lines[0].startswith("error: "):
        return f"not one line of error: {' / '.join(lines)[:300]}"
    return None if re.search(pattern, lines[0]) else f"the error does not name {pattern}: {lines[0][:300]}"


# In order of value: what comes late is left out when the budget is short.
STEPS = {
    "devices": devices,
    "conformance-1": conformance(1),
    "dead-peer": dead_peer,
    "strategies": strategies,
    "conformance-2": conformance(2),
    "step-time": step_time,
    "all-reduce": all_reduce,
    "wgpu": wgpu,
    "conformance-4": conformance(4),
}

# Those of a check without a GPU, before the others.
DRY_STEPS = {"command-lines": command_lines, "refusals": refusals}


def about(step):
    """What a step does, in a line."""
    text = step.__doc__ or conformance.__doc__
    return text.strip()


def select(wanted, names):
    """The steps that were asked for by name or by the part of it before a hyphen; raises ValueError for an unknown one."""
    chosen = []
    for each in wanted:
        matching = [name for name in names if name == each or name.startswith(each + "-")]
        if not matching:
            raise ValueError(f"--only {each}: no such step; choose from {', '.join(names)}")
        chosen += matching
    return [name for name in names if name in chosen]
