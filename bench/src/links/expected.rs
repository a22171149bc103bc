//! What a profile asks for between its ends, and what there is to measure of it.

use std::time::Duration;

use rig::link::{Carrier, MAX_ENDS, PipeSpec, Profile};

/// One thing to measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Measure {
    /// The rate from ends that all send more than they can.
    Rate {
        from: Vec<usize>,
        to: usize,
    },
    /// The delay one way.
    Delay {
        from: usize,
        to: usize,
    },
    RoundTrip {
        from: usize,
        to: usize,
    },
    /// What is lost, out of order and twice while nothing overflows.
    Harm {
        from: usize,
        to: usize,
    },
    /// What one TCP connection makes of it.
    Tcp {
        from: usize,
        to: usize,
    },
    /// What our QUIC transport makes of it.
    Quic {
        from: usize,
        to: usize,
    },
}

/// The path from one end to another.
#[derive(Clone, Copy, Debug)]
pub(super) struct LinkPath<'a> {
    pub(super) up: &'a PipeSpec,
    pub(super) down: &'a PipeSpec,
}

/// Ends enough that the others can send more to end 0 than it can receive, and that there are all that are not as usual.
pub(super) fn ends(profile: &Profile) -> usize {
    let unusual = profile.unusual.keys().max().map_or(0, |last| last + 2);
    let least = unusual.max(2);
    let Some(down) = profile.pipes(0).down.rate_bits_per_s else { return least };
    let enough = |ends: &usize| {
        let ups = (1..*ends).map(|end| profile.pipes(end).up.rate_bits_per_s.unwrap_or(u64::MAX));
        ups.fold(0, u64::saturating_add) > down
    };
    (least..=FEW_ENDS.max(least)).find(enough).unwrap_or(least).min(MAX_ENDS)
}

/// Each end is a process that wants a core.
const FEW_ENDS: usize = 8;

/// What there is to measure: all of it from and to end 0, rates and delays from and to each unusual end as well.
pub(super) fn measures(profile: &Profile, flows: bool) -> Vec<Measure> {
    let ends = ends(profile);
    let mut measures = Vec::new();
    for end in (0..ends).filter(|end| *end == 0 || profile.unusual.contains_key(end)) {
        let other = partner(profile, end, ends);
        if profile.carrier != Carrier::None {
            measures.push(Measure::Rate { from: vec![end], to: other });
            measures.push(Measure::Rate { from: (0..ends).filter(|from| *from != end).collect(), to: end });
        }
        measures.push(Measure::Delay { from: end, to: other });
        if end == 0 {
            measures.push(Measure::Delay { from: other, to: 0 });
            measures.push(Measure::RoundTrip { from: 0, to: other });
        }
        if profile.carrier == Carrier::Emulated {
            measures.push(Measure::Harm { from: end, to: other });
        }
    }
    if flows {
        // A job of two ranks lives at the first two ends.
        measures.extend([Measure::Tcp { from: 1, to: 0 }, Measure::Quic { from: 1, to: 0 }]);
    }
    measures
}

/// Another end, one that is as usual if there is one.
fn partner(profile: &Profile, end: usize, ends: usize) -> usize {
    let others = || (0..ends).filter(|other| *other != end);
    others().find(|other| !profile.unusual.contains_key(other)).or_else(|| others().next()).unwrap_or(0)
}

impl<'a> LinkPath<'a> {
    pub(super) fn new(profile: &'a Profile, from: usize, to: usize) -> Self {
        LinkPath { up: &profile.pipes(from).up, down: &profile.pipes(to).down }
    }

    /// Bits a second, where there is a limit.
    pub(super) fn rate(&self) -> Option<u64> {
        self.up.rate_bits_per_s.into_iter().chain(self.down.rate_bits_per_s).min()
    }

    /// How long a packet of `bytes` takes on an idle link.
    pub(super) fn delay(&self, bytes: usize) -> Duration {
        let bits = 8.0 * bytes as f64;
        let sending = [self.up, self.down].into_iter().filter_map(|pipe| Some(bits / pipe.rate_bits_per_s? as f64));
        self.up.delay + self.down.delay + Duration::from_secs_f64(sending.sum())
    }

    /// By how much delays differ at most from the middle.
    pub(super) fn jitter(&self) -> Duration {
        self.up.jitter + self.down.jitter
    }
}

/// Bits a second that come out at `to` while all of `from` send more than they can. What is lost on its way has used the rate.
pub(super) fn rate(profile: &Profile, from: &[usize], to: usize) -> Option<f64> {
    let through = |pipe: &PipeSpec, comes: f64| {
        let passes = pipe.rate_bits_per_s.map_or(comes, |bits| comes.min(bits as f64));
        passes * (1.0 - pipe.loss.average())
    };
    let ups = from.iter().map(|from| through(&profile.pipes(*from).up, f64::INFINITY)).sum();
    Some(through(&profile.pipes(to).down, ups)).filter(|bits| bits.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(name: &str) -> Profile {
        Profile::find(name).unwrap()
    }

    #[test]
    fn there_are_ends_enough_to_fill_the_way_down() {
        let of = |name| ends(&profile(name));
        assert_eq!((of("loopback"), of("lan-1g"), of("home"), of("mobile"), of("incast")), (2, 3, 7, 4, 3));
        assert_eq!(of("slow-rank"), 3);
    }

    #[test]
    fn unusual_ends_are_measured_too() {
        let all = measures(&profile("slow-rank"), true);
        assert!(all.contains(&Measure::Rate { from: vec![1], to: 0 }), "{all:?}");
        assert!(
            all.contains(&Measure::Rate { from: vec![0, 2], to: 1 })
                && all.contains(&Measure::Delay { from: 1, to: 0 })
        );
        assert!(all.contains(&Measure::Delay { from: 0, to: 2 }), "the usual end is measured with another usual one");
        let kinds = |name: &str| measures(&profile(name), false);
        let has_rate = |all: &[Measure]| all.iter().any(|measure| matches!(measure, Measure::Rate { .. }));
        assert!(has_rate(&kinds("wan")) && !has_rate(&kinds("loopback")));
        assert!(
            all.contains(&Measure::Tcp { from: 1, to: 0 }) && !kinds("wan").contains(&Measure::Tcp { from: 1, to: 0 })
        );
    }

    #[test]
    fn what_a_path_should_do() {
        let wan = profile("wan");
        let path = LinkPath::new(&wan, 0, 1);
        assert_eq!(path.rate(), Some(100_000_000));
        // Sent twice at 100 Mbit/s.
        assert_eq!(path.delay(1250), Duration::from_micros(25_200));
        let home = profile("home");
        assert_eq!((rate(&home, &[1], 0), rate(&home, &[1, 2, 3, 4, 5, 6], 0)), (Some(20e6), Some(100e6)));
        assert_eq!(rate(&profile("wan-lossy"), &[1], 0), Some(99.5e6));
        assert_eq!(rate(&profile("loopback"), &[1], 0), None);
    }
}
