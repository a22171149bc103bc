//! What an emulator has counted, and whether it was itself what held packets back.

use serde::{Deserialize, Serialize};

use super::model::Tally;

/// What has happened since the start or the last reset.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Counters {
    /// In the order of the spec.
    pub ends: Vec<EndCounters>,
    /// Processor time of the emulator, and the time that has passed.
    pub cpu_s: f64,
    pub wall_s: f64,
    /// How long the emulator could have run and had no core; 0 where the kernel does not tell.
    pub starved_s: f64,
    /// Packets for none of the ends, of IPv6, or broken. They passed no pipe.
    pub strangers: u64,
    /// Packets that the kernel dropped because the emulator had not fetched those before them.
    pub missed: u64,
    /// Packets dropped because too many bytes were under way at once.
    pub no_memory: u64,
    /// Packets that the receiving device did not take.
    pub unwritten: u64,
}

/// Both directions of one end.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct EndCounters {
    /// What the end sent. Late is how long packets may at most have waited to be fetched, before their time in the pipe began.
    pub up: PipeCounters,
    /// What the end received. Late is how long after their time in the pipe was over packets reached the end.
    pub down: PipeCounters,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct PipeCounters {
    /// Packets that came, and their bytes with IP headers. Those that came out are `packets - lost - overflowed + duplicated`, but for
    /// those that are still under way.
    pub packets: u64,
    pub bytes: u64,
    pub lost: u64,
    pub overflowed: u64,
    /// Held back so that others could overtake.
    pub reordered: u64,
    pub duplicated: u64,
    pub late_p50_us: f64,
    pub late_p99_us: f64,
    pub late_max_us: f64,
    /// The delay that the pipe was to have, to compare lateness with.
    pub delay_us: f64,
}

/// Late is what is later than this, or than `LATE_SHARE` of the delay of the way if that is more.
const LATE_US: f64 = 1000.0;
const LATE_SHARE: f64 = 0.05;

/// Above this share of a core an emulator has little left for bursts.
const BUSY: f64 = 0.85;

/// A shorter time says nothing about shares.
const SHORTEST_S: f64 = 0.05;

impl Counters {
    /// Why the figures of the link are doubtful, in words: the emulator, not the link that it plays, held packets back or dropped them.
    pub(crate) fn bottleneck(&self) -> Option<String> {
        let mut why = Vec::new();
        let shortest_up = self.ends.iter().map(|end| end.up.delay_us).fold(f64::INFINITY, f64::min);
        let shortest_down = self.ends.iter().map(|end| end.down.delay_us).fold(f64::INFINITY, f64::min);
        let late = |pipe: &PipeCounters, others: f64| {
            let over = pipe.late_p99_us - LATE_US.max(LATE_SHARE * (pipe.delay_us + others));
            (over > 0.0).then_some(pipe.late_p99_us)
        };
        // The worst alone; at one end or many, it is the same thread.
        let worst = |lates: Vec<(usize, f64)>| lates.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
        let all = || self.ends.iter().enumerate();
        let down = all().filter_map(|(end, of)| Some((end, late(&of.down, shortest_up)?))).collect();
        if let Some((end, us)) = worst(down) {
            why.push(format!("1 % of the packets to end {end} arrived more than {:.1} ms too late", us / 1e3));
        }
        let up = all().filter_map(|(end, of)| Some((end, late(&of.up, shortest_down)?))).collect();
        if let Some((end, us)) = worst(up) {
            why.push(format!(
                "1 % of the packets of end {end} may have waited more than {:.1} ms until the emulator read them",
                us / 1e3
            ));
        }
        if self.wall_s > SHORTEST_S && self.cpu_s > BUSY * self.wall_s {
            why.push(format!("it took {:.0} % of a core", self.cpu_s / self.wall_s * 100.0));
        }
        for (count, what) in [
            (self.missed, "were dropped by the kernel before the emulator read them"),
            (self.no_memory, "were dropped because the emulator held too many"),
            (self.unwritten, "were not accepted by the receiving device"),
        ] {
            if count > 0 {
                why.push(format!("{count} packets {what}"));
            }
        }
        if why.is_empty() {
            return None;
        }
        if self.wall_s > SHORTEST_S && self.starved_s > 0.01 * self.wall_s {
            why.push(format!("it waited for a core {:.0} % of the time", self.starved_s / self.wall_s * 100.0));
        }
        Some(format!("the emulator fell behind: {}", why.join("; ")))
    }
}

impl PipeCounters {
    pub(super) fn new(tally: Tally, late: &Lateness, delay_ns: u64) -> Self {
        let Tally { packets, bytes, lost, overflowed, reordered, duplicated } = tally;
        let us = |ns: u64| ns as f64 / 1e3;
        PipeCounters {
            packets,
            bytes,
            lost,
            overflowed,
            reordered,
            duplicated,
            late_p50_us: us(late.quantile(0.5)),
            late_p99_us: us(late.quantile(0.99)),
            late_max_us: us(late.most),
            delay_us: us(delay_ns),
        }
    }
}

/// How late packets were: a histogram whose classes are less than 1/16 wide.
#[derive(Clone, Debug)]
pub(super) struct Lateness {
    counts: Vec<u64>,
    total: u64,
    most: u64,
}

/// 2^4 classes for each power of two.
const FINE: u32 = 4;

impl Default for Lateness {
    fn default() -> Self {
        Lateness { counts: vec![0; ((65 - FINE) << FINE) as usize], total: 0, most: 0 }
    }
}

impl Lateness {
    pub(super) fn add(&mut self, ns: u64) {
        self.counts[Self::class(ns)] += 1;
        self.total += 1;
        self.most = self.most.max(ns);
    }

    /// What this share of the packets was not later than, in nanoseconds; the upper end of the class it falls into.
    fn quantile(&self, share: f64) -> u64 {
        let rank = ((self.total as f64 * share).ceil() as u64).max(1);
        let mut below = 0;
        for (class, count) in self.counts.iter().enumerate() {
            below += count;
            if below >= rank {
                return Self::largest(class).min(self.most);
            }
        }
        0
    }

    fn class(ns: u64) -> usize {
        let exponent = (63 - (ns | 1).leading_zeros()).saturating_sub(FINE);
        // Small numbers have a class each; above, the leading bits after the first one say which.
        ((exponent << FINE) as u64 + (ns >> exponent)) as usize
    }

    fn largest(class: usize) -> u64 {
        let exponent = ((class >> FINE) as u32).saturating_sub(1);
        let leading = class as u64 - (u64::from(exponent) << FINE);
        (((u128::from(leading) + 1) << exponent) - 1) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_cover_every_time_in_order() {
        let times = (0..64).flat_map(|bit| [(1_u64 << bit) - 1, 1 << bit, (1 << bit) + (1 << bit) / 3]);
        for ns in times.chain([u64::MAX]) {
            let class = Lateness::class(ns);
            let largest = Lateness::largest(class);
            assert!(ns <= largest && largest - ns <= ns / 16, "{ns} is in a class up to {largest}");
            assert_eq!(Lateness::class(largest), class);
            if largest < u64::MAX {
                assert_eq!(Lateness::class(largest + 1), class + 1);
            }
        }
        assert!(Lateness::class(u64::MAX) < Lateness::default().counts.len());
    }

    #[test]
    fn quantiles_are_near() {
        let mut late = Lateness::default();
        assert_eq!(late.quantile(0.5), 0);
        (1..=1000).for_each(|us| late.add(us * 1000));
        let near = |share: f64, ns: u64| {
            let found = late.quantile(share);
            assert!(found >= ns && found - ns <= ns / 16, "{share}: {found}");
        };
        near(0.5, 500_000);
        near(0.99, 990_000);
        near(0.0, 1000);
        assert_eq!((late.quantile(1.0), late.most), (1_000_000, 1_000_000));
    }

    fn calm() -> Counters {
        let pipe = PipeCounters { packets: 10, late_p99_us: 90.0, delay_us: 50_000.0, ..PipeCounters::default() };
        let end = EndCounters { up: PipeCounters { delay_us: 0.0, ..pipe.clone() }, down: pipe };
        Counters { ends: vec![end.clone(), end], cpu_s: 0.1, wall_s: 1.0, ..Counters::default() }
    }

    #[test]
    fn who_falls_behind_says_so() {
        assert_eq!(calm().bottleneck(), None);
        assert_eq!(Counters::default().bottleneck(), None);
        let said = |change: &dyn Fn(&mut Counters)| {
            let mut counters = calm();
            change(&mut counters);
            counters.bottleneck()
        };
        assert_eq!(said(&|c| c.ends[1].down.late_p99_us = 2400.0), None, "less than 5 % of 50 ms");
        let late = said(&|c| c.ends[1].down.late_p99_us = 2600.0).unwrap();
        assert!(late.contains("end 1") && late.contains("2.6 ms"), "{late}");
        let late = said(&|c| c.ends[0].up.late_p99_us = 2600.0).unwrap();
        assert!(late.contains("end 0") && late.contains("read them"), "{late}");
        let busy = said(&|c| c.cpu_s = 0.9).unwrap();
        assert!(busy.contains("90 % of a core"), "{busy}");
        assert!(said(&|c| c.missed = 3).unwrap().contains("3 packets were dropped by the kernel"));
        assert!(said(&|c| c.no_memory = 3).unwrap().contains("held too many"));
        let starved = said(&|c| (c.unwritten, c.starved_s) = (1, 0.2)).unwrap();
        assert!(starved.contains("not accepted") && starved.contains("20 % of the time"), "{starved}");
        assert_eq!(said(&|c| c.starved_s = 0.2), None, "it was in time nevertheless");
    }
}
