//! What a link is like: profiles, by name or from a file.
//!
//! Every rank, or every group of ranks that share an end, is joined to one middle by two pipes: `up` takes what it sends, `down` what it
//! receives. A packet goes through the up pipe of the one and then through the down pipe of the other, so both apply to it: a
//! delay or a loss that should count once a direction stands in `up` alone, and two ends get the least of the two rates.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::MTU;
use super::emulator::{Loss, PipeSpec};
use super::hub;
use super::rate::Rate;
use super::units::{show_bytes, show_share, show_time};

/// What carries packets between ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Carrier {
    /// Loopback, where all ranks share one network.
    None,
    /// The kernel's virtual cables, joined by a bridge, with its token bucket filter where there is a rate.
    Veth,
    /// This program's emulator, through TUN devices.
    Emulated,
}

/// What a link is like.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Profile {
    pub name: String,
    /// One line about it.
    pub about: String,
    pub carrier: Carrier,
    /// Largest packet in bytes, with the IP header.
    pub mtu: u32,
    /// Of everything that is drawn at random.
    pub seed: u64,
    /// The pipes of every end but the following.
    pub usual: Pipes,
    /// Ends that are not as usual, by number.
    pub unusual: BTreeMap<usize, Pipes>,
}

/// The pipes of one end.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Pipes {
    /// For what it sends.
    pub up: PipeSpec,
    /// For what it receives.
    pub down: PipeSpec,
}

/// The default queue of a pipe, as the time that a packet waits at most: a packet that would wait longer is dropped.
const QUEUE_MS: u64 = 50;

/// More than the kernel's filters can count.
const MOST_QUEUED: u64 = 1 << 30;

impl Profile {
    /// Loopback as it is.
    pub fn loopback() -> Self {
        Profile {
            name: "loopback".into(),
            about: String::new(),
            carrier: Carrier::None,
            mtu: *MTU.end(),
            seed: 0,
            usual: Pipes::default(),
            unusual: BTreeMap::new(),
        }
    }

    /// The pipes of an end.
    pub fn pipes(&self, end: usize) -> &Pipes {
        self.unusual.get(&end).unwrap_or(&self.usual)
    }

    /// Of all pipes of all ends.
    pub(super) fn shortest_queue(&self) -> Option<u64> {
        let all = self.unusual.values().chain([&self.usual]);
        all.flat_map(|pipes| [pipes.up.queue_bytes, pipes.down.queue_bytes]).flatten().min()
    }

    /// Bytes that leave a pipe at once after a pause, however low its rate.
    pub fn burst_bytes(&self, pipe: &PipeSpec) -> u64 {
        match self.carrier {
            Carrier::Veth if pipe.rate_bits_per_s.is_some() => hub::burst(pipe, self.mtu),
            Carrier::None | Carrier::Veth | Carrier::Emulated => 0,
        }
    }

    /// Whether a sender waits while the queue of its `up` pipe is full, as it does for its own network card: packets are lost in queues
    /// further on only.
    pub fn holds_senders(&self) -> bool {
        self.carrier == Carrier::Veth
    }

    /// One line about what it asks for.
    pub fn describe(&self) -> String {
        if self.carrier == Carrier::None {
            return "loopback".into();
        }
        let mut text = format!("MTU {}, {}", self.mtu, self.usual);
        for (end, pipes) in &self.unusual {
            text += &format!(", but end {end}: {pipes}");
        }
        text
    }
}

/// The default queue of a pipe with a rate, in bytes.
pub(super) fn usual_queue(rate: Rate, mtu: u32) -> u64 {
    rate.bytes_in(QUEUE_MS).clamp(2 * u64::from(mtu), MOST_QUEUED)
}

impl Pipes {
    /// The slower of the two rates.
    pub(super) fn least_rate(&self) -> Option<u64> {
        self.up.rate_bits_per_s.into_iter().chain(self.down.rate_bits_per_s).min()
    }
}

impl fmt::Display for Pipes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "up {}, down {}", show(&self.up), show(&self.down))
    }
}

fn show(pipe: &PipeSpec) -> String {
    let mut parts = vec![pipe.rate_bits_per_s.map_or("unlimited".into(), |bits| Rate::of_bits(bits).to_string())];
    parts.extend(pipe.queue_bytes.map(|bytes| format!("queue {}", show_bytes(bytes))));
    if !pipe.delay.is_zero() {
        parts.push(format!("delay {}", show_time(pipe.delay)));
    }
    if !pipe.jitter.is_zero() {
        parts.push(format!("jitter {}", show_time(pipe.jitter)));
    }
    match pipe.loss {
        Loss::None => {}
        Loss::Random { probability } => parts.push(format!("loss {}", show_share(probability))),
        Loss::Bursty { .. } => parts.push(format!("loss {} in bursts", show_share(pipe.loss.average()))),
    }
    if pipe.reorder_probability > 0.0 {
        let (share, by) = (show_share(pipe.reorder_probability), show_time(pipe.reorder_by));
        parts.push(format!("{share} late by {by}"));
    }
    if pipe.duplicate_probability > 0.0 {
        parts.push(format!("{} twice", show_share(pipe.duplicate_probability)));
    }
    format!("({})", parts.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_of_this_program_can_be_read() {
        for name in Profile::names() {
            let profile = Profile::find(name).unwrap();
            assert_eq!(profile.name, name);
            assert!(!profile.about.is_empty(), "{name}");
            let rates = [profile.usual.up.rate_bits_per_s, profile.usual.down.rate_bits_per_s];
            assert_eq!(rates.iter().all(Option::is_some), !["loopback", "unlimited"].contains(&name), "{name}");
        }
        assert_eq!(Profile::find("loopback").unwrap().carrier, Carrier::None);
    }

    #[test]
    fn the_wan_is_what_it_is_called() {
        let wan = Profile::find("wan").unwrap();
        let round_trip = 2 * (wan.usual.up.delay + wan.usual.down.delay);
        let rate = wan.usual.least_rate().unwrap();
        assert_eq!((round_trip.as_millis(), rate), (50, 100_000_000));
        let product = rate / 8 * 50 / 1000;
        assert_eq!((wan.usual.up.queue_bytes, product), (Some(625_000), 625_000));
        assert_eq!(wan.usual.up.loss, Loss::None);
        let lossy = Profile::find("wan-lossy").unwrap();
        let lost: f64 = [&lossy.usual.up, &lossy.usual.down].iter().map(|pipe| pipe.loss.average()).sum();
        assert!((lost - 0.005).abs() < 1e-12);
    }

    #[test]
    fn one_rank_may_be_slower() {
        let profile = Profile::find("slow-rank").unwrap();
        let rate = |end| profile.pipes(end).least_rate().unwrap();
        assert!(rate(1) * 5 <= rate(0) && rate(0) == rate(2));
        assert!(profile.describe().contains("but end 1"), "{}", profile.describe());
    }

    #[test]
    fn there_is_no_other() {
        let why = Profile::find("pigeon").unwrap_err();
        assert!(why.contains("pigeon") && why.contains("wan-lossy"), "{why}");
        let why = Profile::find("./pigeon.toml").unwrap_err();
        assert!(why.contains("./pigeon.toml"), "{why}");
    }
}
