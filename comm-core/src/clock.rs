//! The clock of deadlines and of silence. It stands still while this process does.
//!
//! A process that was stopped (SIGSTOP, a frozen container, a virtual machine that was paused) finds on waking that time has passed
//! in which it neither worked nor listened. If that time counted, it would accuse others of its own silence. A thread that does
//! nothing else looks at the system's clock ten times a second; what lies between two looks beyond [`MOST`] is time in which this
//! process did not run. A thread that reads the clock before finds the gap itself.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How often the thread looks.
const LOOK: Duration = Duration::from_millis(100);

/// Most time between two looks that counts. So much of every standstill counts too, and a machine that is so busy that the thread
/// gets no turn for longer makes deadlines later by what is beyond it.
pub const MOST: Duration = Duration::from_millis(250);

/// How long this process has run since the first call, without the time in which it was stopped.
///
/// Never runs backwards by more than [`MOST`], and that only while a standstill is being taken note of.
pub fn running() -> Duration {
    static CLOCK: OnceLock<Clock> = OnceLock::new();
    CLOCK.get_or_init(Clock::start).running()
}

struct Clock {
    epoch: Instant,
    /// `None` if no thread could be had: then all time counts.
    looks: Option<&'static AtomicU64>,
}

impl Clock {
    fn start() -> Self {
        static LOOKS: AtomicU64 = AtomicU64::new(0);
        let epoch = Instant::now();
        let look = move || {
            loop {
                thread::sleep(LOOK);
                let looked = LastReading::from_bits(LOOKS.load(Ordering::Acquire)).again(epoch.elapsed());
                LOOKS.store(looked.to_bits(), Ordering::Release);
            }
        };
        let thread = thread::Builder::new().name("comm-clock".into()).spawn(look);
        Clock { epoch, looks: thread.is_ok().then_some(&LOOKS) }
    }

    fn running(&self) -> Duration {
        let Some(looks) = self.looks else { return self.epoch.elapsed() };
        // In this order: with a time from before a standstill and a look from after it, the standstill would be taken off twice.
        let looked = LastReading::from_bits(looks.load(Ordering::Acquire));
        let now = self.epoch.elapsed();
        now.saturating_sub(looked.lost(now))
    }
}

/// The last reading of the clock, in one number, so that it is read and written as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LastReading {
    /// When it was, since the epoch, in [`UNIT`]s.
    at: u64,
    /// How much had been lost by then, in the same.
    lost: u64,
}

/// 36 bits of these are 34 years of running, 28 bits 49 days of standing still; what was lost beyond those counts.
const UNIT: u128 = 16_000_000;

const LOST_BITS: u32 = 28;

impl LastReading {
    fn from_bits(bits: u64) -> Self {
        LastReading { at: bits >> LOST_BITS, lost: bits & ((1 << LOST_BITS) - 1) }
    }

    fn to_bits(self) -> u64 {
        (self.at << LOST_BITS) | self.lost.min((1 << LOST_BITS) - 1)
    }

    /// The next reading.
    fn again(self, now: Duration) -> Self {
        LastReading { at: units(now), lost: units(self.lost(now)) }
    }

    /// How much of the time since the epoch this process has not been running.
    fn lost(self, now: Duration) -> Duration {
        time(self.lost) + now.saturating_sub(time(self.at)).saturating_sub(MOST)
    }
}

fn units(time: Duration) -> u64 {
    (time.as_nanos() / UNIT) as u64
}

fn time(units: u64) -> Duration {
    Duration::from_nanos(units.saturating_mul(UNIT as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn looked_at(times: &[f64]) -> LastReading {
        times.iter().fold(LastReading::from_bits(0), |looked, time| looked.again(Duration::from_secs_f64(*time)))
    }

    #[test]
    fn a_standstill_is_lost_and_nothing_else_is() {
        let regular: Vec<f64> = (1..600).map(|look| f64::from(look) * 0.11).collect();
        assert_eq!(looked_at(&regular).lost(66 * SECOND), Duration::ZERO);
        // 30 seconds between two looks.
        let frozen = looked_at(&[0.1, 0.2, 30.2, 30.3]);
        let lost = frozen.lost(30 * SECOND + SECOND / 2).as_secs_f64();
        assert!((29.7..=29.8).contains(&lost), "{lost}");
        // A reader that comes before the thread finds the same.
        let early = looked_at(&[0.1, 0.2]).lost(30 * SECOND + SECOND / 5).as_secs_f64();
        assert!((early - lost).abs() < 0.05, "{early} and {lost}");
        assert_eq!(LastReading::from_bits(frozen.to_bits()), frozen);
    }

    #[test]
    fn what_does_not_fit_counts() {
        let years = looked_at(&[0.1, 1e9]);
        assert!(years.lost > 1 << LOST_BITS);
        let kept = LastReading::from_bits(years.to_bits());
        assert_eq!((kept.at, kept.lost), (years.at, (1 << LOST_BITS) - 1));
    }

    #[test]
    fn it_goes_on_while_this_process_does() {
        let (began, from) = (Instant::now(), running());
        thread::sleep(SECOND / 2);
        let (took, ran) = (began.elapsed(), running() - from);
        assert!(ran <= took + MOST, "{ran:?} of {took:?}");
        assert!(ran >= SECOND / 8, "{ran:?} of {took:?}");
    }
}
