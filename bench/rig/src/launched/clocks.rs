//! How the monotonic clocks of a job's ranks differ from rank 0's, by round trips as NTP has them (RFC 5905, section 8), over the control plane.
//!
//! A gather of the control plane is complete when rank 0 has the last rank's message, and its result then goes from rank 0 to all. So a pair of
//! gathers is a round trip of every rank to rank 0: in the first, which rank 0 begins before the others' messages come, each rank's message
//! goes to rank 0; for the second rank 0 waits until the others have begun it, and its own message goes to each rank.

use std::thread;
use std::time::{Duration, Instant};

use comm_core::control::ControlExt;
use comm_core::{Control, Deadline, Error};
use serde::{Deserialize, Serialize};

use crate::record::ClockOffset;

/// Round trips, of which the shortest counts; fewer where they take longer than this together.
const ROUND_TRIPS: usize = 24;
const LONGEST: Duration = Duration::from_secs(2);

/// How long rank 0 waits, beyond the round trip, for the others to begin a gather, and how long at most.
const MARGIN: Duration = Duration::from_micros(300);
const MOST: Duration = Duration::from_millis(500);

/// What the shortest round trip to rank 0 says of a rank's clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClockReading {
    /// By how much it is ahead of rank 0's, in nanoseconds; off by at most half the round trip.
    pub offset_ns: i128,
    pub round_trip_ns: i128,
}

/// What a rank tells in a gather, in nanoseconds of its own clock.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Told {
    /// When the gather before was complete here.
    before: u64,
    /// Right before this one.
    now: u64,
    /// Of rank 0: whether another round trip follows this one.
    again: bool,
}

/// Compares the clocks of all ranks with rank 0's: a reading for each rank but 0, in order, which all ranks get. `now` reads this rank's clock,
/// in nanoseconds. All ranks call it together.
///
/// # Errors
/// Those of the control plane.
pub fn compare(control: &dyn Control, now: &dyn Fn() -> u64, deadline: Deadline) -> Result<Vec<ClockReading>, Error> {
    let is_root = control.rank() == 0;
    let (mut before, began) = (0, Instant::now());
    let mut gather = |again: bool| {
        let told = control.gather("clocks", &Told { before, now: now(), again }, deadline)?;
        before = now();
        Ok::<_, Error>(told)
    };
    gather(true)?;
    let mut gathers = Vec::new();
    for trip in 1.. {
        let asked = Instant::now();
        gathers.push(gather(true)?);
        if is_root {
            thread::sleep((asked.elapsed() + MARGIN).min(MOST));
        }
        let told = gather(trip < ROUND_TRIPS && began.elapsed() < LONGEST)?;
        let again = told.first().is_some_and(|root| root.again);
        gathers.push(told);
        if !again {
            break;
        }
    }
    // In which each tells when the last one was complete.
    gathers.push(gather(false)?);
    let of_rank = |rank: usize| {
        let trips = (0..gathers.len() - 2).step_by(2).map(|first| round_trip(&gathers[first..first + 3], rank));
        trips.min_by_key(|reading| reading.round_trip_ns)
    };
    Ok((1..control.world_size()).filter_map(of_rank).collect())
}

/// The round trip of two gathers, of which the ones after each say when they were complete.
fn round_trip(gathers: &[Vec<Told>], rank: usize) -> ClockReading {
    let [request, response, after] = [0, 1, 2].map(|number| (gathers[number][0], gathers[number][rank]));
    let [sent, received, answered, came] =
        [request.1.now, response.0.before, response.0.now, after.1.before].map(i128::from);
    ClockReading {
        offset_ns: ((sent - received) + (came - answered)) / 2,
        round_trip_ns: (came - sent) - (answered - received),
    }
}

/// The offset during what was between two readings: the mean of both. Its error is half of the longer round trip, and what the clocks drifted
/// apart meanwhile.
pub fn between(before: &ClockReading, after: &ClockReading) -> ClockOffset {
    let ms = |ns: i128| ns as f64 / 1e6;
    let round_trip_ms = ms(before.round_trip_ns.max(after.round_trip_ns));
    let drift_ms = ms(after.offset_ns - before.offset_ns);
    ClockOffset {
        offset_ms: ms((before.offset_ns + after.offset_ns) / 2),
        error_ms: round_trip_ms / 2.0 + drift_ms.abs(),
        round_trip_ms,
        drift_ms,
    }
}

#[cfg(test)]
mod tests {
    use comm_core::local;

    use super::*;
    use crate::sys;

    #[test]
    fn planted_shifts_are_found_within_the_error() {
        // Rank 1's clock is 5 s ahead, rank 2's a day behind, on a machine that has run for longer.
        let shifts: [i64; 3] = [0, 5_000_000_000, -86_400_000_000_000];
        let ranks = local::group(3, 1);
        let all: Vec<Vec<ClockReading>> = thread::scope(|scope| {
            let read = |(rank, shift): (&local::LocalRank, i64)| {
                let now = || (sys::now() + 100_000_000_000_000).saturating_add_signed(shift);
                compare(&*rank.control, &now, Deadline::after(Duration::from_secs(30))).unwrap()
            };
            let threads: Vec<_> = ranks.iter().zip(shifts).map(|one| scope.spawn(move || read(one))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(all[0].len(), 2);
        for readings in &all {
            assert_eq!(readings, &all[0], "ranks differ");
        }
        for (reading, shift) in all[0].iter().zip(&shifts[1..]) {
            println!("{reading:?}");
            let off = (reading.offset_ns - i128::from(*shift)).abs();
            assert!(reading.round_trip_ns > 0 && off <= reading.round_trip_ns / 2, "{off} ns off: {reading:?}");
        }
    }

    #[test]
    fn a_slow_way_back_is_within_the_error() {
        let told = |before, now| Told { before, now, again: true };
        // Rank 1 is 1000 ahead: it sends at 1100, which is 100, and rank 0 has it at 110; rank 0 answers at 200, which comes at 290, 1290.
        let gathers = [
            vec![told(0, 50), told(0, 1100)],
            vec![told(110, 200), told(1160, 1170)],
            vec![told(250, 300), told(1290, 1300)],
        ];
        let reading = round_trip(&gathers, 1);
        assert_eq!(reading, ClockReading { offset_ns: 1040, round_trip_ns: 100 });
    }

    #[test]
    fn drift_between_two_readings_is_part_of_the_error() {
        let reading = |offset_ns, round_trip_ns| ClockReading { offset_ns, round_trip_ns };
        let found = between(&reading(7_000_000, 200_000), &reading(7_500_000, 100_000));
        assert_eq!((found.offset_ms, found.drift_ms, found.round_trip_ms), (7.25, 0.5, 0.2));
        assert!((found.error_ms - 0.6).abs() < 1e-12);
    }
}
