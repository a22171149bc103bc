//! How fast the processor runs.
//!
//! The same piece of work, a chain of multiplications in which each needs the one before, is timed many times over, and
//! the fastest time counts: other processes may delay a piece of a millisecond, but not all of them. Where the
//! system says how often it was too hot, or that its settings changed, that is read as well.

use std::fs;
use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a piece of work is meant to take, how long the processor gets to come to speed, and how many pieces are
/// timed.
const PIECE: Duration = Duration::from_millis(1);
const RAMP: Duration = Duration::from_millis(15);
const PIECES: usize = 40;

/// The clock has moved if the same work takes so much more or less.
const MOVED: f64 = 0.05;

/// The speed at a moment.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Clock {
    /// Multiplications of a piece of work, and how long it takes.
    size: u64,
    piece: Duration,
    /// How often cores or packages were too hot, over all of them, where the system counts.
    too_hot: Option<u64>,
    /// Settings of frequency scaling: path and value.
    settings: Vec<(String, String)>,
}

impl Clock {
    /// Chooses a piece of work and times it, and reads the files of the system under `root`.
    pub(super) fn read(root: &Path) -> Clock {
        let rate = ramp_up();
        let size = ((rate * PIECE.as_secs_f64()) as u64).clamp(1_000, 1_000_000_000);
        Clock::with(size, root)
    }

    /// The same at a later moment, with the same piece of work.
    pub(super) fn again(&self, root: &Path) -> Clock {
        ramp_up();
        Clock::with(self.size, root)
    }

    fn with(size: u64, root: &Path) -> Clock {
        let mut clock = Clock { size, piece: time_piece(size), too_hot: None, settings: Vec::new() };
        let cores = fs::read_dir(root.join("sys/devices/system/cpu")).into_iter().flatten().flatten();
        for core in cores {
            let read = |name: &str| fs::read_to_string(core.path().join(name)).ok().map(|text| text.trim().to_string());
            for name in ["thermal_throttle/core_throttle_count", "thermal_throttle/package_throttle_count"] {
                if let Some(count) = read(name).and_then(|text| text.parse::<u64>().ok()) {
                    clock.too_hot = Some(clock.too_hot.unwrap_or(0).saturating_add(count));
                }
            }
            for name in ["cpufreq/scaling_governor", "cpufreq/scaling_max_freq"] {
                if let Some(value) = read(name) {
                    clock.settings.push((format!("{}/{name}", core.file_name().to_string_lossy()), value));
                }
            }
        }
        clock.settings.sort();
        clock
    }

    /// What changed between this moment and a later one.
    pub(super) fn moved_until(&self, later: &Clock) -> Vec<String> {
        let mut found = Vec::new();
        let (before, after) = (self.piece.as_secs_f64(), later.piece.as_secs_f64());
        if before > 0.0 && after > 0.0 && ((after / before).max(before / after) - 1.0) > MOVED {
            let percent = 100.0 * (after / before - 1.0);
            found.push(format!(
                "the same work took {:.2} ms before the run and {:.2} ms after it ({percent:+.0} %): the processor's clock changed, or \
                 other programs used its core",
                before * 1e3,
                after * 1e3
            ));
        }
        if let (Some(before), Some(after)) = (self.too_hot, later.too_hot)
            && after > before
        {
            found.push(format!("the processor slowed down {} times because it was too hot", after - before));
        }
        let changed = |(path, value): &&(String, String)| {
            self.settings.iter().any(|(other, before)| other == path && before != value)
        };
        if let Some((path, value)) = later.settings.iter().find(changed) {
            found.push(format!("a setting of the processor's clock changed during the run: {path} is now {value}"));
        }
        found
    }
}

/// Works until the processor has come to speed; returns multiplications a second.
fn ramp_up() -> f64 {
    const BIT: u64 = 10_000;
    let end = Instant::now() + RAMP;
    let mut rate = 0.0_f64;
    while Instant::now() < end {
        let start = Instant::now();
        work(BIT);
        rate = rate.max(BIT as f64 / start.elapsed().as_secs_f64().max(1e-9));
    }
    rate
}

/// The fastest of many pieces of work.
fn time_piece(size: u64) -> Duration {
    let piece = |_| {
        let start = Instant::now();
        work(size);
        start.elapsed()
    };
    (0..PIECES).map(piece).min().unwrap_or_default()
}

/// `size` multiplications, each of the result of the one before.
fn work(size: u64) -> u64 {
    let chain =
        (0..size).fold(black_box(1_u64), |value, _| value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
    black_box(chain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clock(microseconds: u64) -> Clock {
        Clock { size: 0, piece: Duration::from_micros(microseconds), too_hot: None, settings: Vec::new() }
    }

    #[test]
    fn more_than_a_twentieth_is_a_move() {
        assert_eq!(clock(2000).moved_until(&clock(2090)), Vec::<String>::new());
        assert_eq!(clock(2000).moved_until(&clock(1910)), Vec::<String>::new());
        assert!(
            clock(2000).moved_until(&clock(2200))[0].contains("2.00 ms before the run and 2.20 ms after it (+10 %)")
        );
        assert!(clock(2000).moved_until(&clock(1800))[0].contains("(-10 %)"));
        assert_eq!(clock(0).moved_until(&clock(1800)), Vec::<String>::new());
    }

    #[test]
    fn heat_and_settings_are_read_where_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let core = folder.path().join("sys/devices/system/cpu/cpu0");
        let nothing = Clock { size: 0, piece: Duration::ZERO, ..Clock::read(folder.path()) };
        assert_eq!(nothing, clock(0));
        let write = |name: &str, value: &str| {
            fs::create_dir_all(core.join(name).parent().unwrap()).unwrap();
            fs::write(core.join(name), value).unwrap();
        };
        write("thermal_throttle/core_throttle_count", "3\n");
        write("thermal_throttle/package_throttle_count", "no number\n");
        write("cpufreq/scaling_max_freq", "3000000\n");
        let before = Clock { size: 0, piece: Duration::ZERO, ..Clock::read(folder.path()) };
        write("thermal_throttle/core_throttle_count", "5\n");
        write("cpufreq/scaling_max_freq", "2000000\n");
        let after = Clock { size: 0, piece: Duration::ZERO, ..Clock::read(folder.path()) };
        assert_eq!(before.moved_until(&before), Vec::<String>::new());
        let found = before.moved_until(&after);
        assert!(found[0].contains("slowed down 2 times"), "{found:?}");
        assert!(found[1].ends_with("cpu0/cpufreq/scaling_max_freq is now 2000000"), "{found:?}");
    }

    #[test]
    fn the_work_is_timed_in_about_the_time_meant() {
        let start = Instant::now();
        let clock = Clock::read(Path::new("/nowhere"));
        let times = [clock.piece, clock.again(Path::new("/nowhere")).piece];
        println!("{times:?} in {:?}", start.elapsed());
        assert!(times.iter().all(|time| (PIECE / 4..PIECE * 4).contains(time)), "{times:?}");
    }
}
