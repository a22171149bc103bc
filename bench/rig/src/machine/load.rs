//! Processor time that others took.
//!
//! `/proc/stat` counts all work on the cores that this process may use, `getrusage` that of this process and its
//! children; the difference is that of strangers. Two things must not be mistaken for it:
//! - time in interrupts. What the kernel does for our own packets is counted there, often while another process or none
//!   runs, and depending on the kernel it is part of the interrupted process's time as well. So it counts as nobody's,
//!   and user and kernel time are compared each by itself: what our processes were charged for interrupts cannot hide
//!   what strangers did in user mode.
//! - the sampling of `/proc/stat`, by ticks: over a short run it is uncertain by more than what counts as busy.
//!
//! Time that the host of a virtual machine gave to others (steal) counts as taken, and so does time for which a control
//! group's quota held us back.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use gpt2::cores;

use super::sys::{Used, ticks_a_second, used};

/// A machine is busy when others took more than this share of its cores,
const BUSY: f64 = 0.05;

/// and more than chance explains: three standard errors of a count of ticks, each at most half the root of all ticks.
const CHANCE: f64 = 1.5;

/// Processor time up to a moment.
#[derive(Clone, Debug)]
pub(super) struct Load {
    at: Instant,
    ours: Used,
    all: Cores,
    /// For which a quota held us back.
    throttled: Option<Duration>,
    ticks_a_second: f64,
}

/// Seconds of all cores that this process may use.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Cores {
    count: usize,
    user: f64,
    system: f64,
    stolen: f64,
}

impl Load {
    /// With the files of the system under `root`; `None` where they do not say enough. What the processes `beside` have taken is
    /// ours too.
    pub(super) fn read(root: &Path, beside: &[u32]) -> Option<Load> {
        let text = |path: &str| fs::read_to_string(root.join(path)).ok();
        let ticks_a_second = ticks_a_second()?;
        let allowed = text("proc/self/status").and_then(|status| cores::of_status(&status));
        let all = Cores::parse(&text("proc/stat")?, ticks_a_second, allowed.as_deref())?;
        let throttled = text("sys/fs/cgroup/cpu.stat").and_then(|stat| throttled(&stat));
        let mut ours = used()?;
        for process in beside {
            let (user, system) =
                text(&format!("proc/{process}/stat")).and_then(|stat| times(&stat)).unwrap_or_default();
            ours.user += Duration::from_secs_f64(user as f64 / ticks_a_second);
            ours.system += Duration::from_secs_f64(system as f64 / ticks_a_second);
        }
        Some(Load { at: Instant::now(), ours, all, throttled, ticks_a_second })
    }

    /// What others took between this moment and a later one, if it is enough to disturb.
    pub(super) fn strangers_until(&self, later: &Load) -> Vec<String> {
        let wall = later.at.saturating_duration_since(self.at).as_secs_f64();
        let cores = later.all.count;
        // Cores may come and go; then there is nothing to subtract from.
        if cores != self.all.count || cores == 0 || wall <= 0.0 {
            return Vec::new();
        }
        let ours = |time: fn(&Used) -> Duration| time(&later.ours).saturating_sub(time(&self.ours)).as_secs_f64();
        let user = (later.all.user - self.all.user - ours(|used| used.user)).max(0.0);
        let system = (later.all.system - self.all.system - ours(|used| used.system)).max(0.0);
        let stolen = (later.all.stolen - self.all.stolen).max(0.0);
        let capacity = wall * cores as f64;
        let limit = BUSY.max(CHANCE / (capacity * self.ticks_a_second).sqrt());
        let mut found = Vec::new();
        if (user + system + stolen) / capacity > limit {
            let percent = 100.0 * (user + system + stolen) / capacity;
            found.push(format!(
                "other processes and virtual machines took {percent:.0} % of {cores} cores during {wall:.1} s: {:.1} s by other \
                 processes, {stolen:.1} s by other virtual machines",
                user + system
            ));
        }
        if let (Some(before), Some(after)) = (self.throttled, later.throttled) {
            let held = after.saturating_sub(before).as_secs_f64();
            if held / capacity > BUSY {
                found.push(format!(
                    "the control group's CPU quota throttled threads for {held:.1} s during {wall:.1} s"
                ));
            }
        }
        found
    }
}

impl Cores {
    /// Sums the lines of single cores of `/proc/stat`, of those `allowed` where that is known.
    fn parse(stat: &str, ticks_a_second: f64, allowed: Option<&[usize]>) -> Option<Cores> {
        let mut sum = Cores::default();
        for line in stat.lines() {
            let mut words = line.split_whitespace();
            let Some(number) = words.next().and_then(|name| name.strip_prefix("cpu")?.parse::<usize>().ok()) else {
                continue;
            };
            if allowed.is_some_and(|allowed| !allowed.contains(&number)) {
                continue;
            }
            // user, nice, system, idle, iowait, irq, softirq, steal; what guests took is in user already.
            let ticks: Vec<u64> = words.map_while(|word| word.parse().ok()).collect();
            let [user, nice, system, _, _, _, _, steal, ..] = ticks[..] else { return None };
            let seconds = |ticks: u64| ticks as f64 / ticks_a_second;
            sum.count += 1;
            sum.user += seconds(user) + seconds(nice);
            sum.system += seconds(system);
            sum.stolen += seconds(steal);
        }
        (sum.count > 0).then_some(sum)
    }
}

/// Ticks that a process, and those of its children that it has waited for, have taken for themselves and in the kernel, of `/proc/PID/stat`.
fn times(stat: &str) -> Option<(u64, u64)> {
    // The second field, the program's name, may hold anything, and ends with the last bracket; these are fields 14 to 17 (man 5 proc).
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace().skip(11).map_while(|word| word.parse::<u64>().ok());
    let (user, system) = (fields.next()?, fields.next()?);
    Some((user.saturating_add(fields.next()?), system.saturating_add(fields.next()?)))
}

/// How long quotas held threads back so far, from `cpu.stat`.
fn throttled(stat: &str) -> Option<Duration> {
    let microseconds = stat.lines().find_map(|line| line.strip_prefix("throttled_usec "))?;
    Some(Duration::from_micros(microseconds.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str =
        "cpu  300 0 60 0 0 0 0 9 0 0\ncpu0 100 20 30 400 5 6 70 8 0 0\ncpu1 200 0 30 400 5 6 70 1 0 0\nintr 5\n";

    fn load(seconds: f64, user: f64, system: f64, stolen: f64, ours: (f64, f64)) -> Load {
        Load {
            at: Instant::now() + Duration::from_secs_f64(seconds),
            ours: Used { user: Duration::from_secs_f64(ours.0), system: Duration::from_secs_f64(ours.1) },
            all: Cores { count: 2, user, system, stolen },
            throttled: Some(Duration::ZERO),
            ticks_a_second: 100.0,
        }
    }

    #[test]
    fn the_cores_that_may_be_used_are_summed() {
        let all = Cores::parse(STAT, 100.0, None).unwrap();
        assert_eq!((all.count, all.user, all.system), (2, 3.2, 0.6));
        assert!((all.stolen - 0.09).abs() < 1e-9);
        assert_eq!(
            Cores::parse(STAT, 100.0, Some(&[1])).unwrap(),
            Cores { count: 1, user: 2.0, system: 0.3, stolen: 0.01 }
        );
        for odd in ["", "cpu0", "cpu0 1 2 3", "cpu0 x y z 1 2 3 4 5", "nonsense\u{0}", "cpu 1 2 3 4 5 6 7 8"] {
            assert_eq!(Cores::parse(odd, 100.0, None), None, "{odd}");
        }
        assert_eq!(throttled("nr_throttled 4\nthrottled_usec 2500000\n"), Some(Duration::from_millis(2500)));
    }

    #[test]
    fn strangers_are_what_is_not_ours() {
        let before = load(0.0, 100.0, 50.0, 1.0, (10.0, 5.0));
        let found = |later: Load| before.strangers_until(&later);
        // All of it was ours; then 2 of 20 core-seconds were not; then the host took them.
        assert_eq!(found(load(10.0, 112.0, 53.0, 1.0, (22.0, 8.0))), Vec::<String>::new());
        let busy = found(load(10.0, 114.0, 53.0, 1.0, (22.0, 8.0)));
        assert!(busy[0].contains("took 10 % of 2 cores during 10.0 s: 2.0 s by other processes, 0.0 s by"), "{busy:?}");
        let stolen = found(load(10.0, 112.0, 53.0, 3.0, (22.0, 8.0)));
        assert!(stolen[0].contains("0.0 s by other processes, 2.0 s by other virtual machines"), "{stolen:?}");
        // Interrupts charged to us, 4 s, do not hide user time of others, nor are they strangers' where they are not
        // charged to us.
        assert_eq!(found(load(10.0, 114.0, 53.0, 1.0, (22.0, 12.0))).len(), 1);
        // 8 % of half a second is within what ticks can tell.
        assert_eq!(found(load(0.5, 100.58, 50.0, 1.0, (10.5, 5.0))), Vec::<String>::new());
    }

    #[test]
    fn a_quota_that_held_us_back_is_said() {
        let before = load(0.0, 0.0, 0.0, 0.0, (0.0, 0.0));
        let later = Load { throttled: Some(Duration::from_secs(3)), ..load(10.0, 0.0, 0.0, 0.0, (0.0, 0.0)) };
        assert!(before.strangers_until(&later)[0].contains("throttled threads for 3.0 s"));
        let other = Load { all: Cores { count: 3, ..later.all }, ..later };
        assert_eq!(before.strangers_until(&other), Vec::<String>::new());
    }

    #[test]
    fn missing_files_are_no_load() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Load::read(folder.path(), &[]).is_none());
        fs::create_dir_all(folder.path().join("proc")).unwrap();
        fs::write(folder.path().join("proc/stat"), b"\xff\xfe").unwrap();
        assert!(Load::read(folder.path(), &[]).is_none());
        fs::write(folder.path().join("proc/stat"), STAT).unwrap();
        assert_eq!(Load::read(folder.path(), &[]).unwrap().all.count, 2);
    }

    /// A process that does not belong to us: started by a process that has itself ended.
    #[test]
    fn a_stranger_that_computes_is_seen() {
        let Some(before) = Load::read(Path::new("/"), &[]) else {
            println!("skipped: this system has no /proc/stat");
            return;
        };
        // The shell leaves `timeout` behind, so nobody of ours waits for it.
        let start = "timeout 0.8 sh -c 'while :; do :; done' </dev/null >/dev/null 2>&1 &";
        assert!(std::process::Command::new("sh").args(["-c", start]).status().unwrap().success());
        std::thread::sleep(Duration::from_millis(900));
        let found = before.strangers_until(&Load::read(Path::new("/"), &[]).unwrap());
        assert!(found.iter().any(|what| what.starts_with("other processes")), "{found:?}");
    }
}
