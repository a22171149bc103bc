//! Which threads took processor time.
//!
//! A thread that waits in an operation also does the network's work meanwhile, system calls included: over `tcp-raw`, ZeroMQ and QUIC
//! alike, blocking operations are driven by the thread that calls them. What `network` shows is what ran beside it.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;
use std::time::Duration;

use gpt2::sys::processor_time;

/// How the names of threads begin, and their group. The first that fits counts. Linux keeps 15 bytes of a name.
const GROUPS: [(&str, &str); 6] = [
    ("compute-", "compute"),
    ("comm-control", "control"),
    ("comm-watch", "control"),
    ("stall-reports", "control"),
    // Lanes, drivers, relays.
    ("comm-", "network"),
    ("tokio-", "network"),
];

/// All groups.
const NAMES: [&str; 5] = ["training", "compute", "network", "control", "other"];

/// The unit of processor time in `/proc`: a hundredth of a second to every program (`man 5 proc`, `USER_HZ`).
const TICK: Duration = Duration::from_millis(10);

/// Processor time so far.
pub(super) struct Cpu {
    /// Of the process, threads that have ended included.
    process: Duration,
    threads: HashMap<u32, Thread>,
}

struct Thread {
    name: String,
    /// When it began, in ticks: numbers of threads are given again.
    began: u64,
    busy: Duration,
}

/// Number of the thread that asks.
pub(super) fn this_thread() -> Option<u32> {
    fs::read_link("/proc/thread-self").ok()?.file_name()?.to_str()?.parse().ok()
}

impl Cpu {
    pub(super) fn now() -> Self {
        let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        let threads = tasks.filter_map(|task| {
            // One that has just ended is left out.
            let number = task.file_name().to_str()?.parse().ok()?;
            Some((number, Thread::read(&task.path())?))
        });
        Cpu { threads: threads.collect(), process: processor_time() }
    }

    /// Seconds since `before`, by group. `training` is the time of the thread of this number, and of the main one. Together they are
    /// the time of the process: what threads took that have ended since is `other`.
    pub(super) fn since(&self, before: &Cpu, training: Option<u32>) -> BTreeMap<String, f64> {
        let mut groups: BTreeMap<&str, Duration> = NAMES.map(|name| (name, Duration::ZERO)).into();
        let mut known = Duration::ZERO;
        for (number, thread) in &self.threads {
            let earlier = before.threads.get(number).filter(|earlier| earlier.began == thread.began);
            let busy = thread.busy.saturating_sub(earlier.map_or(Duration::ZERO, |earlier| earlier.busy));
            let is_training = Some(*number) == training || *number == std::process::id();
            *groups.entry(if is_training { "training" } else { group(&thread.name) }).or_default() += busy;
            known += busy;
        }
        let rest = self.process.saturating_sub(before.process).saturating_sub(known);
        *groups.entry("other").or_default() += rest;
        groups.into_iter().map(|(name, busy)| (name.to_string(), busy.as_secs_f64())).collect()
    }
}

impl Thread {
    fn read(task: &Path) -> Option<Self> {
        let text = |name: &str| fs::read_to_string(task.join(name)).ok();
        let mut thread = Thread::parse(&text("stat")?)?;
        // To the nanosecond, where the kernel counts so.
        let exact = text("schedstat").and_then(|text| text.split_whitespace().next()?.parse().ok());
        thread.busy = thread.busy.max(exact.map_or(Duration::ZERO, Duration::from_nanos));
        Some(thread)
    }

    /// The second field, the name, may hold anything, and ends with the last bracket. User and system time are fields 14 and 15, the
    /// start field 22 (`man 5 proc`).
    fn parse(stat: &str) -> Option<Self> {
        let (head, fields) = stat.rsplit_once(')')?;
        let (_, name) = head.split_once('(')?;
        let mut fields = fields.split_whitespace().map(|field| field.parse::<u64>().ok());
        let (user, system) = (fields.nth(11)??, fields.next()??);
        let began = fields.nth(6)??;
        let ticks = u32::try_from(user.saturating_add(system)).unwrap_or(u32::MAX);
        Some(Thread { name: name.into(), began, busy: TICK.saturating_mul(ticks) })
    }
}

fn group(name: &str) -> &'static str {
    GROUPS.into_iter().find(|(prefix, _)| name.starts_with(prefix)).map_or("other", |(_, group)| group)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Instant;

    use super::*;

    const STAT: &str = "71 (a) b (c)) S 1 2 3 4 5 6 7 8 9 10 150 50 13 14 20 0 3 0 4711 22 23";

    fn work(how_long: Duration) {
        let (start, before) = (Instant::now(), Cpu::now());
        let busy = || {
            let number = this_thread().unwrap();
            Thread::read(Path::new(&format!("/proc/self/task/{number}"))).unwrap().busy
        };
        let number = this_thread().unwrap();
        while busy().saturating_sub(before.threads[&number].busy) < how_long {
            assert!(start.elapsed() < Duration::from_secs(20), "work counts for nothing");
            std::hint::black_box((0..100_000_u64).sum::<u64>());
        }
    }

    #[test]
    fn a_line_of_the_kernel_is_read_whatever_the_name() {
        let thread = Thread::parse(STAT).unwrap();
        assert_eq!((thread.name.as_str(), thread.began, thread.busy), ("a) b (c)", 4711, Duration::from_secs(2)));
        for length in 0..STAT.len() {
            let _ = Thread::parse(&STAT[..length]);
        }
        assert!(Thread::parse("1 (x) S 1 2").is_none() && Thread::parse("").is_none());
    }

    #[test]
    fn threads_are_told_apart_by_their_names() {
        for (name, expected) in [
            ("compute-0", "compute"),
            ("comm-lane-3", "network"),
            ("comm-quic-0", "network"),
            ("comm-tcp-gate", "network"),
            ("tokio-rt-worker", "network"),
            // What is left of comm-control-100.
            ("comm-control-10", "control"),
            ("stall-reports", "control"),
            ("gpu-utilization", "other"),
            ("", "other"),
        ] {
            assert_eq!(group(name), expected, "{name:?}");
        }
    }

    #[test]
    fn time_goes_to_the_thread_that_took_it_and_none_is_lost_or_negative() {
        let long = Duration::from_millis(60);
        // Has worked before, and ends in between: its time must not turn negative.
        let (go_on, wait) = channel::<()>();
        let (tell, told) = channel();
        let ends = thread::Builder::new().name("compute-9".into()).spawn(move || {
            work(long);
            tell.send(()).unwrap();
            wait.recv().unwrap();
        });
        told.recv().unwrap();
        let (before, start) = (Cpu::now(), this_thread());
        go_on.send(()).unwrap();
        ends.unwrap().join().unwrap();
        let (stay, stop) = channel::<()>();
        let (tell, told) = channel();
        let lane = thread::Builder::new().name("comm-lane-0".into()).spawn(move || {
            work(long);
            tell.send(()).unwrap();
            let _ = stop.recv();
        });
        told.recv().unwrap();
        let gone = thread::Builder::new().name("comm-lane-1".into()).spawn(move || work(long));
        gone.unwrap().join().unwrap();
        work(long);
        let groups = Cpu::now().since(&before, start);
        drop(stay);
        lane.unwrap().join().unwrap();
        let long = long.as_secs_f64();
        assert!(groups.values().all(|seconds| *seconds >= 0.0), "{groups:?}");
        assert!(groups["training"] >= 0.9 * long, "{groups:?}");
        assert!(groups["network"] >= 0.9 * long, "{groups:?}");
        // Of the thread that began and ended in between; that of the first one before does not count.
        assert!(groups["other"] >= 0.9 * long, "{groups:?}");
        assert_eq!(groups.keys().map(String::as_str).collect::<Vec<_>>(), {
            let mut names = NAMES;
            names.sort_unstable();
            names
        });
    }
}
