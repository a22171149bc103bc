//! The launcher, and the control plane between real processes that are killed and stopped. Not run by the usual harness: the
//! tests start this executable again as ranks and as a launcher.

#![allow(clippy::unwrap_used, reason = "a test, though its harness is its own")]

#[path = "ctrl_c/mod.rs"]
mod ctrl_c;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use comm_core::control::{TcpControl, TcpOptions};
use comm_core::job::EXIT_STOPPED;
use comm_core::job::Job;
use comm_core::launch::{Launch, LaunchOutcome, Output};
use comm_core::process::StopRequest;
use comm_core::{Control, Deadline, Error};
use libtest_mimic::{Arguments, Failed, Trial};

/// What a process of this executable does, when it is not the test itself.
const ROLE: &str = "LAUNCHER_TEST_ROLE";
/// Which rank it happens to.
const VICTIM: &str = "LAUNCHER_TEST_VICTIM";
/// How long ranks that are asked to leave have for it, in milliseconds.
const STOP: &str = "LAUNCHER_TEST_STOP";
/// How long the launcher waits for its reader, in milliseconds.
const DRAIN_TIMEOUT: &str = "LAUNCHER_TEST_DRAIN_TIMEOUT";

fn main() {
    if let Ok(role) = std::env::var(ROLE) {
        if let Some(rank_role) = role.strip_prefix("launch ") {
            let plain = rank_role.strip_prefix("plain ");
            let mut launch = ranks(plain.unwrap_or(rank_role), 3);
            launch.output = if plain.is_some() { Output::RankZeroPlain } else { Output::Prefixed };
            if let Ok(drain_timeout) = std::env::var(DRAIN_TIMEOUT) {
                launch.drain_timeout = Duration::from_millis(drain_timeout.parse().unwrap());
            }
            launch.stop = std::env::var(STOP).ok().map(|stop| Duration::from_millis(stop.parse().unwrap()));
            let outcome = launch.run().unwrap();
            eprintln!("cause: {}", outcome.cause.unwrap_or_default());
            std::process::exit(outcome.code);
        }
        std::process::exit(rank(&role));
    }
    let tests: &[(&str, fn())] = &[
        ("all_well", all_well),
        ("exit_codes", exit_codes),
        ("a_killed_rank_is_128_plus_the_signal", killed_rank),
        ("survivors_of_sigkill_name_the_dead", survivors_name_the_dead),
        ("a_stopped_rank_is_noticed", stopped_rank),
        ("a_rank_that_goes_on_learns_that_it_was_given_up", resumed_rank),
        ("an_abort_on_the_way_out_arrives", abort_on_the_way_out),
        ("ranks_that_ignore_everything_are_killed", stubborn_ranks),
        ("survivors_get_time_to_report", grace),
        ("a_job_has_a_time_limit", time_limit),
        ("lines_have_prefixes", prefixes),
        ("rank_0_can_be_plain", plain_rank_zero),
        ("a_slow_reader_gets_everything", slow_reader),
        ("nobody_has_to_read", no_reader),
        ("a_blocked_stdout_does_not_hold_stderr", blocked_stdout),
        ("a_signal_ends_the_wait_for_a_reader", signal_while_printing),
        ("a_terminal_that_stops_background_output_does_not_stop_rank_0", tostop),
        ("ctrl_c_reaches_the_ranks_once", ctrl_c_once),
        ("nothing_outlives_a_killed_launcher", killed_launcher),
        ("what_ranks_leave_behind_is_killed", orphans),
        ("the_secret_is_private_and_removed", meeting_point),
        ("an_echo_is_never_the_cause", echoes),
        ("who_does_not_end_is_named_rather_than_an_echo", echo_of_who_does_not_end),
        ("the_longest_times_are_possible", longest_times),
        ("ranks_see_no_other_launcher", foreign_launcher),
        ("ranks_may_open_as_many_files_as_the_system_lets_them", file_limit),
        ("ranks_that_are_asked_to_leave_have_time_for_it", asked_to_leave),
        ("ranks_that_do_not_leave_when_asked_are_killed", does_not_leave),
        ("a_job_that_failed_is_started_again", started_again),
        ("no_ranks_and_no_program", nonsense),
    ];
    let trials = tests.iter().map(|&(name, test)| Trial::test(name, move || run_test(test))).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

fn run_test(test: fn()) -> Result<(), Failed> {
    test();
    Ok(())
}

/// What a rank does.
fn rank(role: &str) -> i32 {
    let job = Job::from_env().unwrap().expect("started by the launcher");
    let victim = std::env::var(VICTIM).ok().and_then(|v| v.parse().ok()).unwrap_or(1);
    let mine = job.rank == victim;
    match role {
        "exit 3" => return if mine { 3 } else { 0 },
        // The others notice the victim's end before the launcher can.
        "echo" if mine => {
            thread::sleep(Duration::from_millis(400));
            return 3;
        }
        "echo of a kill" if mine => {
            thread::sleep(Duration::from_millis(400));
            kill(std::process::id(), "KILL");
        }
        "echo" | "echo of a kill" | "nothing but echoes" => return comm_core::job::EXIT_ECHO,
        "print much" => {
            (0..1000).for_each(|number| println!("{number} {}", "x".repeat(94)));
            println!("LAST LINE");
            return 0;
        }
        "print and say so" => {
            println!("{}", "x".repeat(1 << 20));
            eprintln!("printed");
            return 0;
        }
        "echo of a sleeper" => {
            if mine {
                thread::sleep(Duration::from_secs(60));
            }
            return comm_core::job::EXIT_ECHO;
        }
        "where from" => {
            println!("source {}, {:?} here", job.source, comm_core::job::ranks_on_this_machine());
            for (name, value) in std::env::vars().filter(|(name, _)| FOREIGN.iter().any(|(other, _)| other == name)) {
                println!("{name}={value}");
            }
            return 0;
        }
        "limit" => {
            let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
            println!("{}", limits.lines().find(|line| line.starts_with("Max open files")).unwrap());
            return 0;
        }
        "print" => {
            println!("out {}", job.rank);
            eprintln!("err {}", job.rank);
            print!("no end");
            return 0;
        }
        "kill without control" if mine => kill(std::process::id(), "KILL"),
        "kill without control" => {
            thread::sleep(Duration::from_millis(300));
            println!("reported");
            return 7;
        }
        "stubborn" if mine => return 5,
        "stubborn" => {
            ignore_signals();
            println!("still here");
            thread::sleep(Duration::from_secs(60));
        }
        "sleep" => {
            println!("pid {}", std::process::id());
            println!("path {}", std::env::var("COMM_SECRET_FILE").unwrap());
            thread::sleep(Duration::from_secs(60));
        }
        "leave when asked" | "stay when asked" => {
            let stop = StopRequest::default();
            stop.heed_signals().unwrap();
            println!("ready {}", std::process::id());
            while !stop.is_asked() {
                thread::sleep(Duration::from_millis(5));
            }
            // Longer than the others' grace, with a second request in between.
            thread::sleep(Duration::from_millis(if role.starts_with("leave") { 2500 } else { 60_000 }));
            return EXIT_STOPPED;
        }
        "fail once" => return if std::env::args().nth(1).as_deref() == Some("again") { 0 } else { 3 },
        "count signals" => {
            let caught = signal_hook::iterator::Signals::new([signal_hook::consts::SIGINT]);
            let mut caught = caught.unwrap();
            println!("pid {}", std::process::id());
            caught.wait().for_each(|_| println!("got one"));
            thread::sleep(Duration::from_millis(200));
            println!("more: {}", caught.pending().count());
            return 0;
        }
        "where" => {
            let path = std::path::PathBuf::from(std::env::var("COMM_SECRET_FILE").unwrap());
            let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
            let address = std::env::var("COMM_ADDR").unwrap();
            let address = Path::new(address.strip_prefix("file:").unwrap());
            println!("modes {:o} {:o}", mode(address.parent().unwrap()), mode(&path));
            println!("path {}\naddress {}", path.display(), address.display());
            println!("secret {}", std::fs::read_to_string(&path).unwrap());
            return 0;
        }
        "orphan" => {
            let script = "sleep 60 & echo pid $!";
            assert!(Command::new("sh").args(["-c", script]).status().unwrap().success());
            return 0;
        }
        _ => {}
    }
    let options = TcpOptions {
        heartbeat: Duration::from_millis(50),
        liveness: if role.starts_with("stop") { Duration::from_millis(500) } else { Duration::from_secs(10) },
        ..TcpOptions::default()
    };
    let control = TcpControl::connect_with(&job, &[], options, Deadline::after(Duration::from_secs(20))).unwrap();
    let gathered = control.all_gather("there", &[job.rank as u8], Deadline::after(Duration::from_secs(20))).unwrap();
    assert_eq!(gathered, (0..job.world_size).map(|r| vec![r as u8]).collect::<Vec<_>>());
    match role {
        "well" => {
            control.leave(Deadline::after(Duration::from_secs(20))).unwrap();
            return 0;
        }
        "kill" if mine => {
            println!("at {}", now());
            kill(std::process::id(), "KILL");
        }
        "stop and go" if mine => {
            let pid = std::process::id();
            let script = format!("(sleep 1; kill -CONT {pid}) & kill -STOP {pid}");
            assert!(Command::new("sh").args(["-c", &script]).status().unwrap().success());
            // Its part would complete the others' gathering if it came before their word.
            while control.failure().is_none() {
                thread::sleep(Duration::from_millis(1));
            }
        }
        "stop" if mine => kill(std::process::id(), "STOP"),
        "abort" if mine => {
            control.poison(&Error::Aborted { by: job.rank, reason: "had enough".into() });
            std::process::exit(9);
        }
        _ => {}
    }
    match control.all_gather("never", &[], Deadline::after(Duration::from_secs(20))) {
        Err(error) => {
            println!("at {}", now());
            println!("error: {error}");
            4
        }
        Ok(_) => 0,
    }
}

/// Microseconds of a clock that all processes of a machine share.
fn now() -> u128 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_micros()
}

fn ignore_signals() {
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::flag::register(signal, Default::default()).unwrap();
    }
}

fn kill(pid: u32, signal: &str) {
    let status = Command::new("sh").args(["-c", &format!("kill -{signal} {pid}")]).status().unwrap();
    assert!(status.success());
}

fn ranks(role: &str, count: usize) -> Launch {
    let mut launch = Launch::new(std::env::current_exe().unwrap(), count);
    launch.env = vec![(ROLE.into(), role.into())];
    launch.output = Output::Captured;
    launch.grace = Duration::from_secs(2);
    launch.timeout = Some(Duration::from_secs(30));
    if let Ok(victim) = std::env::var(VICTIM) {
        launch.env.push((VICTIM.into(), victim));
    }
    launch
}

fn with_victim(role: &str, count: usize, victim: usize) -> LaunchOutcome {
    let mut launch = ranks(role, count);
    launch.env.push((VICTIM.into(), victim.to_string()));
    launch.run().unwrap()
}

fn line(outcome: &LaunchOutcome, rank: usize, start: &str) -> String {
    let stdout = &outcome.captured[rank].stdout;
    let found = stdout.lines().find_map(|line| line.strip_prefix(start));
    found.unwrap_or_else(|| panic!("no {start:?} from rank {rank} in {outcome:#?}")).to_string()
}

fn all_well() {
    let start = Instant::now();
    for count in [1, 4] {
        let outcome = ranks("well", count).run().unwrap();
        assert_eq!((outcome.code, outcome.cause.as_deref()), (0, None), "{:?}", outcome.captured);
        assert_eq!(outcome.codes, vec![0; count]);
    }
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

fn exit_codes() {
    let outcome = ranks("exit 3", 3).run().unwrap();
    assert_eq!(outcome.code, 3);
    assert_eq!(outcome.cause.as_deref(), Some("rank 1 exited with code 3"));
    assert_eq!(outcome.codes, [0, 3, 0]);
}

fn killed_rank() {
    let outcome = ranks("kill without control", 3).run().unwrap();
    assert_eq!(outcome.code, 137);
    assert_eq!(outcome.cause.as_deref(), Some("rank 1 was killed by signal 9 (SIGKILL)"));
    assert_eq!(outcome.codes, [7, 137, 7]);
}

fn survivors_name_the_dead() {
    for victim in [0, 2] {
        let outcome = with_victim("kill", 4, victim);
        assert_eq!(outcome.code, 137, "{outcome:#?}");
        assert_eq!(outcome.cause, Some(format!("rank {victim} was killed by signal 9 (SIGKILL)")));
        let died: u128 = line(&outcome, victim, "at ").parse().unwrap();
        for survivor in (0..4).filter(|&rank| rank != victim) {
            assert_eq!(
                line(&outcome, survivor, "error: "),
                format!("rank {victim} was lost: its control connection was closed")
            );
            // From before the shell that kills is started.
            let after = line(&outcome, survivor, "at ").parse::<u128>().unwrap().saturating_sub(died);
            assert!(after < 1_000_000, "{after} µs");
            eprintln!("rank {survivor} knew of rank {victim}'s end within {after} µs, start of the killer included");
        }
    }
}

/// What the others say of a rank that is stopped.
fn silent(victim: usize) -> &'static str {
    match victim {
        0 => "rank 0 was lost: it does not answer",
        _ => "rank 1 was lost: it sent no heartbeat for 0.5 s",
    }
}

fn stopped_rank() {
    for victim in [0, 1] {
        let mut launch = ranks("stop", 3);
        launch.env.push((VICTIM.into(), victim.to_string()));
        launch.grace = Duration::from_millis(500);
        let outcome = launch.run().unwrap();
        for survivor in (0..3).filter(|&rank| rank != victim) {
            let error = line(&outcome, survivor, "error: ");
            assert!(error.contains(silent(victim)), "{error}");
            assert_eq!(outcome.codes[survivor], 4);
        }
        assert_eq!(outcome.codes[victim], 137, "a stopped process is not ended by SIGTERM");
    }
}

fn resumed_rank() {
    for victim in [0, 1] {
        let outcome = with_victim("stop and go", 3, victim);
        let expected = line(&outcome, 2, "error: ");
        assert!(expected.contains(silent(victim)), "{expected}");
        for rank in 0..3 {
            assert_eq!(line(&outcome, rank, "error: "), expected);
            assert_eq!(outcome.codes[rank], 4);
        }
    }
}

fn abort_on_the_way_out() {
    for victim in [0, 2] {
        let outcome = with_victim("abort", 3, victim);
        for survivor in (0..3).filter(|&rank| rank != victim) {
            assert_eq!(line(&outcome, survivor, "error: "), format!("rank {victim} aborted the job: had enough"));
        }
        assert_eq!(outcome.codes[victim], 9);
    }
}

fn stubborn_ranks() {
    let mut launch = ranks("stubborn", 3);
    launch.grace = Duration::from_millis(300);
    let start = Instant::now();
    let outcome = launch.run().unwrap();
    assert!(start.elapsed() < Duration::from_secs(20), "the ranks would sleep for a minute");
    assert_eq!(outcome.code, 5);
    assert_eq!(outcome.codes, [137, 5, 137]);
}

fn echoes() {
    let outcome = ranks("echo", 3).run().unwrap();
    assert_eq!((outcome.code, outcome.cause.as_deref()), (3, Some("rank 1 exited with code 3")));
    let outcome = ranks("echo of a kill", 3).run().unwrap();
    assert_eq!((outcome.code, outcome.cause.as_deref()), (137, Some("rank 1 was killed by signal 9 (SIGKILL)")));
    let outcome = ranks("nothing but echoes", 3).run().unwrap();
    assert_eq!(outcome.code, comm_core::job::EXIT_ECHO);
    assert!(outcome.cause.unwrap().ends_with("exited with code 75, because another rank had failed"));
}

fn grace() {
    let outcome = ranks("kill without control", 2).run().unwrap();
    assert_eq!(outcome.captured[0].stdout, "reported\n");
}

fn time_limit() {
    let mut launch = ranks("sleep", 2);
    launch.timeout = Some(Duration::from_millis(300));
    launch.grace = Duration::from_secs(30);
    let start = Instant::now();
    let outcome = launch.run().unwrap();
    assert!(start.elapsed() < launch.grace / 2, "SIGTERM comes at once");
    assert_eq!((outcome.code, outcome.codes), (124, vec![143, 143]));
    assert!(outcome.cause.unwrap().contains("did not end within"));
}

/// This executable as a launcher.
fn launcher(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(ROLE, format!("launch {role}")).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn prefixes() {
    let out = launcher("print").output().unwrap();
    let sorted = |bytes: &[u8]| {
        let mut lines: Vec<String> = String::from_utf8_lossy(bytes).lines().map(str::to_string).collect();
        lines.sort();
        lines
    };
    let expected: Vec<String> =
        (0..3).flat_map(|r| [format!("[rank {r}] no end"), format!("[rank {r}] out {r}")]).collect();
    assert_eq!(sorted(&out.stdout), expected);
    let expected: Vec<String> = (0..3).map(|r| format!("[rank {r}] err {r}")).chain(["cause: ".into()]).collect();
    assert_eq!(sorted(&out.stderr), expected);
    assert_eq!(out.status.code(), Some(0));
}

fn plain_rank_zero() {
    // The output of this process itself cannot be looked at, so only that nothing goes wrong.
    let mut launch = ranks("exit 3", 2);
    launch.output = Output::RankZeroPlain;
    assert_eq!(launch.run().unwrap().code, 3);
}

fn slow_reader() {
    // The reader's pauses are shorter than the launcher's limit, but all of it takes longer.
    let mut child = launcher("print much").env(DRAIN_TIMEOUT, "800").spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let (mut got, mut piece) = (Vec::new(), [0; 4096]);
    loop {
        thread::sleep(Duration::from_millis(20));
        let count = stdout.read(&mut piece).unwrap();
        got.extend_from_slice(&piece[..count]);
        if count == 0 {
            break;
        }
    }
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let got = String::from_utf8(got).unwrap();
    for rank in 0..3 {
        let start = format!("[rank {rank}] ");
        let lines: Vec<&str> = got.lines().filter_map(|line| line.strip_prefix(&start)).collect();
        assert_eq!(lines.len(), 1001, "of rank {rank}");
        assert!(lines.iter().take(1000).enumerate().all(|(n, line)| line.starts_with(&format!("{n} x"))));
        assert_eq!(lines[1000], "LAST LINE");
    }
}

fn no_reader() {
    let mut child = launcher("print much").env(DRAIN_TIMEOUT, "300").spawn().unwrap();
    assert_eq!(ended(&mut child), Some(0), "with 300 kB that nobody reads");
    let mut got = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut got).unwrap();
    assert!(got.len() <= 64 << 10, "{} bytes: the pipe held all of it", got.len());
}

/// A launcher whose three ranks are ready to be asked to leave, and who they are.
fn ready_to_leave(role: &str, stop: &str) -> (std::process::Child, Vec<u32>) {
    let mut child = launcher(role).env(STOP, stop).spawn().unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let pids: Vec<u32> = said.by_ref().filter_map(|line| line.split_once("] ready ")?.1.parse().ok()).take(3).collect();
    assert_eq!(pids.len(), 3);
    // Nobody waits for the reader any more.
    (child, pids)
}

fn asked_to_leave() {
    for signal in ["TERM", "USR1"] {
        let (mut child, _) = ready_to_leave("leave when asked", "30000");
        kill(child.id(), signal);
        thread::sleep(Duration::from_millis(100));
        kill(child.id(), "TERM");
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!((ended(&mut child), said.as_str()), (Some(EXIT_STOPPED), "cause: \n"), "{signal}");
    }
    // Asked one by one, as by a launcher of the launcher.
    let (mut child, pids) = ready_to_leave("leave when asked", "30000");
    pids.into_iter().for_each(|pid| kill(pid, "USR1"));
    assert_eq!(ended(&mut child), Some(EXIT_STOPPED));
}

fn does_not_leave() {
    let (mut child, pids) = ready_to_leave("stay when asked", "100");
    kill(child.id(), "USR1");
    let code = ended(&mut child);
    assert_eq!(code, Some(128 + signal_hook::consts::SIGUSR1));
    assert!(pids.iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists()));
}

fn started_again() {
    let mut launch = ranks("fail once", 2);
    let mut codes = Vec::new();
    let outcome = launch.run_again(&mut |outcome| {
        codes.push(outcome.code);
        Some(vec!["again".into()])
    });
    let outcome = outcome.unwrap();
    assert_eq!((codes, outcome.code, outcome.cause), (vec![3], 0, None));
    let outcome = ranks("fail once", 2).run_again(&mut |_| None).unwrap();
    assert_eq!(outcome.code, 3);
}

fn blocked_stdout() {
    let mut child = launcher("print and say so").spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let said = stderr.by_ref().take(3).filter(|line| line.ends_with("] printed")).count();
    assert_eq!(said, 3);
    // Nothing of standard output has been read until now, and nothing is lost.
    let mut got = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut got).unwrap();
    assert_eq!(got.iter().filter(|byte| **byte == b'x').count(), 3 << 20);
    assert_eq!(ended(&mut child), Some(0));
}

fn signal_while_printing() {
    let mut child = launcher("print and say so").env(DRAIN_TIMEOUT, "600000").spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert_eq!(stderr.by_ref().take(3).count(), 3);
    // The first may still have come to the ranks.
    let deadline = Deadline::after(Duration::from_secs(30));
    while child.try_wait().unwrap().is_none() {
        assert!(!deadline.has_passed(), "it waits for its reader in spite of SIGTERM");
        kill(child.id(), "TERM");
        thread::sleep(Duration::from_millis(20));
    }
}

/// A process with a terminal of its own, which stops whoever writes to it in the background: as rank 0 is, which has a process group to itself.
fn tostop() {
    if !Command::new("script").arg("--version").output().is_ok_and(|out| out.status.success()) {
        println!("skipped: there is no program `script`");
        return;
    }
    let program = std::env::current_exe().unwrap();
    let command = format!("stty tostop && exec '{}'", program.display());
    let out = Command::new("script")
        .args(["-q", "-e", "-c", &command, "/dev/null"])
        .env(ROLE, "launch plain print")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    assert_eq!(out.status.code(), Some(0), "{said}");
    assert!(said.lines().any(|line| line.trim_end() == "out 0"), "{said}");
}

/// The exit code of a process that should soon end by itself.
fn ended(child: &mut Child) -> Option<i32> {
    let deadline = Deadline::after(Duration::from_secs(30));
    while !deadline.has_passed() {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code().or(Some(-1));
        }
        thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    None
}

/// Variables of other launchers, as a shell of `srun --pty` or a notebook may have them.
const FOREIGN: [(&str, &str); 7] = [
    ("RANK", "0"),
    ("WORLD_SIZE", "1"),
    ("LOCAL_WORLD_SIZE", "1"),
    ("SLURM_PROCID", "0"),
    ("SLURM_NTASKS", "1"),
    ("SLURM_NTASKS_PER_NODE", "1"),
    ("PMI_RANK", "0"),
];

fn foreign_launcher() {
    let out = launcher("where from").envs(FOREIGN).output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    let mut lines: Vec<&str> = said.lines().collect();
    lines.sort_unstable();
    let expected: Vec<String> = (0..3)
        .map(|rank| {
            format!("[rank {rank}] source COMM_RANK and COMM_WORLD_SIZE of this program's own launcher, Some(3) here")
        })
        .collect();
    assert_eq!(lines, expected);
    assert_eq!(out.status.code(), Some(0));
}

fn file_limit() {
    let program = std::env::current_exe().unwrap();
    let script = format!("ulimit -S -n 64; ulimit -H -n 512; exec '{}'", program.display());
    let out = Command::new("sh").args(["-c", &script]).env(ROLE, "launch limit").output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    let soft_and_hard =
        |line: &str| line.split_whitespace().rev().skip(1).take(2).map(str::to_string).collect::<Vec<_>>();
    assert_eq!(said.lines().map(soft_and_hard).collect::<Vec<_>>(), vec![["512", "512"]; 3], "{said}");
}

fn echo_of_who_does_not_end() {
    let mut launch = ranks("echo of a sleeper", 3);
    launch.grace = Duration::from_millis(300);
    let outcome = launch.run().unwrap();
    assert_eq!(outcome.code, 143, "{outcome:?}");
    let cause = outcome.cause.unwrap();
    assert!(cause.starts_with("rank 1 did not end by itself; rank "), "{cause}");
    assert!(cause.ends_with("exited with code 75, because another rank had failed"), "{cause}");
}

fn longest_times() {
    let mut launch = ranks("exit 3", 3);
    (launch.grace, launch.timeout, launch.drain_timeout) = (Duration::MAX, Some(Duration::MAX), Duration::MAX);
    let outcome = launch.run().unwrap();
    assert_eq!((outcome.code, outcome.codes), (3, vec![0, 3, 0]));
}

/// Reads `pid N` from each of 3 ranks.
fn pids(child: &mut Child) -> (Vec<u32>, impl BufRead + use<>) {
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut found = Vec::new();
    while found.len() < 3 {
        let mut line = String::new();
        assert_ne!(lines.read_line(&mut line).unwrap(), 0, "ended too early");
        found.extend(line.split("pid ").nth(1).and_then(|pid| pid.trim().parse::<u32>().ok()));
    }
    (found, lines)
}

/// Whether the process runs; one that has ended and waits to be reaped does not.
fn runs(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.trim().is_empty() && !rest.trim().starts_with('Z'))
}

fn assert_gone(pids: &[u32]) {
    let end = Instant::now() + Duration::from_secs(3);
    while pids.iter().any(|&pid| runs(pid)) {
        assert!(Instant::now() < end, "of {pids:?} some still run");
        thread::sleep(Duration::from_millis(5));
    }
}

fn ctrl_c_once() {
    // As a terminal does it: to the whole foreground group.
    let mut child = ctrl_c::heeded(&mut launcher("count signals")).process_group(0).spawn().unwrap();
    let (pids, rest) = pids(&mut child);
    let signal = Command::new("sh").args(["-c", &format!("kill -INT -{}", child.id())]).status().unwrap();
    assert!(signal.success());
    let rest: Vec<String> = rest.lines().map(Result::unwrap).collect();
    assert_eq!(rest.iter().filter(|line| line.ends_with("got one")).count(), 3, "{rest:?}");
    assert_eq!(rest.iter().filter(|line| line.ends_with("more: 0")).count(), 3, "{rest:?}");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_gone(&pids);
}

fn killed_launcher() {
    // Its directory is the one thing that it leaves behind, without the secret.
    let dir = tempfile::tempdir().unwrap();
    let mut child = launcher("sleep").env("TMPDIR", dir.path()).spawn().unwrap();
    let (pids, mut rest) = pids(&mut child);
    assert!(pids.iter().all(|&pid| runs(pid)));
    let mut text = String::new();
    let path = loop {
        text.clear();
        assert_ne!(rest.read_line(&mut text).unwrap(), 0, "ended too early");
        if let Some((_, path)) = text.split_once("path ") {
            break path.trim().to_string();
        }
    };
    let secret = std::fs::read(&path).unwrap();
    assert_eq!(secret.len(), 64);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_gone(&pids);
    assert!(!Path::new(&path).exists());
    for folder in std::fs::read_dir(dir.path()).unwrap() {
        for file in std::fs::read_dir(folder.unwrap().path()).unwrap() {
            assert_ne!(std::fs::read(file.unwrap().path()).unwrap(), secret);
        }
    }
}

fn orphans() {
    let outcome = ranks("orphan", 2).run().unwrap();
    assert_eq!(outcome.code, 0);
    let pids: Vec<u32> = (0..2).map(|rank| line(&outcome, rank, "pid ").parse().unwrap()).collect();
    assert_gone(&pids);
}

fn nonsense() {
    assert!(matches!(Launch::new("true", 0).run(), Err(Error::InvalidArgument(_))));
    let error = Launch::new(Path::new("/no/such/program"), 2).run().unwrap_err().to_string();
    assert!(error.contains("/no/such/program") && error.contains("rank 0"), "{error}");
}

fn meeting_point() {
    let outcome = ranks("where", 2).run().unwrap();
    assert_eq!(line(&outcome, 0, "modes "), "700 600");
    for rank in 0..2 {
        let path = line(&outcome, rank, "path ");
        assert!(path.starts_with(&format!("/proc/{}/fd/", std::process::id())), "{path}");
        // The descriptor's number may have been given to another file meanwhile.
        let secret = line(&outcome, rank, "secret ");
        assert_eq!(secret.len(), 64);
        assert!(!std::fs::read(&path).is_ok_and(|bytes| bytes == secret.as_bytes()));
        assert!(!Path::new(&line(&outcome, rank, "address ")).parent().unwrap().exists());
    }
}
