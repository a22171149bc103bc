//! What a simulation is told of links, transports and processors.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::tcp;

/// The links between ranks: each rank is joined to one middle by a pipe for what it sends and one for what it receives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// What it is called.
    pub name: String,
    /// Largest packet, with the IP header, in bytes.
    pub mtu: u32,
    /// The pipes of every rank but the following.
    pub usual: Pipes,
    /// Ranks that are not as usual.
    pub unusual: BTreeMap<usize, Pipes>,
}

/// The pipes of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Pipes {
    /// For what it sends.
    pub up: Pipe,
    /// For what it receives.
    pub down: Pipe,
}

/// One direction of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Pipe {
    /// Bits a second; `None` where nothing limits it.
    pub bits_per_s: Option<f64>,
    /// Seconds.
    pub delay_s: f64,
    /// Share of packets that is lost at random.
    pub loss: f64,
    /// Bytes that wait at most; `None` where nothing limits them.
    pub queue_bytes: Option<f64>,
    /// Bytes that pass at once after a pause, however low the rate: the depth of a token bucket, which fills again at the rate.
    pub burst_bytes: f64,
    /// Whether a full queue makes its sender wait, as that of the sender's own network card does; one further on drops packets.
    pub holds_sender: bool,
}

/// What a transport costs, beside the link's rate and delay.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// From a rank's call to the arrival of an empty message at one that waits for it, without the link's delay, in seconds.
    pub message_s: f64,
    /// Processor time of a byte that is sent, in seconds.
    pub send_s_per_byte: f64,
    /// Processor time of a byte that is received.
    pub receive_s_per_byte: f64,
    /// Processor time of a received byte that is combined with what is there, beside that.
    pub reduce_s_per_byte: f64,
    /// Headers of a packet, with those of IP, in bytes; of a link's rate payload gets what they leave.
    pub packet_overhead: f64,
    /// The part of the rest of a link's rate that payload gets in the long run.
    pub efficiency: f64,
    /// Bytes that a message's sender may be ahead of its receiver: socket buffers.
    pub buffer_bytes: f64,
    /// Bytes that may be on their way on one connection.
    pub window_bytes: f64,
    /// Bytes that a connection has on its way at a time beyond a message: of a library that sends the next parts before the first have been asked for.
    pub ahead_bytes: f64,
    /// Most bytes a second that one connection carries where nothing else holds it back; `None` for no limit.
    pub connection_bytes_per_s: Option<f64>,
    /// How connections find their rate.
    pub congestion: Congestion,
    /// By how much the shares of connections that go through a pipe at the same time differ from even ones: of two, one gets 1 + this for 1 - this of the other.
    pub unevenness: f64,
    /// How much later a message arrives while every core computes: its receiver's thread waits for a turn, in seconds.
    pub turn_s: f64,
}

/// How a connection finds the rate at which it sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Congestion {
    /// By losses, as the kernel's CUBIC and Reno: the window grows until a queue overflows, and begins anew after a pause.
    #[default]
    Losses,
    /// By losses, and the window outlasts pauses: QUIC's CUBIC and NewReno.
    LossesWithoutRestart,
    /// By what it measures of rate and round trip, as BBR: single losses do not matter, nor do pauses.
    Measured,
}

/// What the ranks compute on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Processors {
    /// A machine for each rank, with so many cores.
    Own {
        /// Cores of each.
        cores: f64,
    },
    /// One machine for all ranks, with the throughput of so many cores.
    Shared {
        /// In units of a core that has the machine to itself: below their number where cores hold each other up.
        cores: f64,
    },
}

/// All that a simulation is told beside the trace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Network {
    /// The links.
    pub link: Link,
    /// The transport.
    pub costs: Costs,
    /// The processors.
    pub processors: Processors,
    /// Threads that compute, in each rank.
    pub threads: f64,
}

impl Link {
    /// A link with the same rate (bits a second) for every rank and in both directions, and a delay from one rank to another.
    pub fn even(name: &str, bits_per_s: Option<f64>, delay_s: f64) -> Self {
        let up = Pipe { bits_per_s, delay_s, ..Pipe::default() };
        let down = Pipe { bits_per_s, ..Pipe::default() };
        Link { name: name.into(), mtu: 1500, usual: Pipes { up, down }, unusual: BTreeMap::new() }
    }

    /// Whether something passes on its way from and to each of `ranks` ranks.
    ///
    /// # Errors
    /// The rank and the direction where nothing does.
    pub(crate) fn check(&self, ranks: usize) -> Result<(), String> {
        let usual = (0..ranks).find(|rank| !self.unusual.contains_key(rank)).map(|rank| (rank, &self.usual));
        let unusual = self.unusual.iter().map(|(rank, pipes)| (*rank, pipes)).filter(|(rank, _)| *rank < ranks);
        for (rank, pipes) in unusual.chain(usual) {
            for (way, pipe) in [("from", pipes.up), ("to", pipes.down)] {
                let why = match pipe {
                    Pipe { bits_per_s: Some(bits), .. } if bits.is_nan() || bits <= 0.0 => "its rate is 0",
                    Pipe { loss, .. } if loss.is_nan() || loss >= 1.0 => "all packets are lost",
                    _ => continue,
                };
                return Err(format!("the link {} delivers no packets {way} rank {rank}: {why}", self.name));
            }
        }
        Ok(())
    }

    /// The pipes of a rank.
    pub fn pipes(&self, rank: usize) -> &Pipes {
        self.unusual.get(&rank).unwrap_or(&self.usual)
    }

    /// From one rank to another, in seconds.
    pub fn delay_s(&self, from: usize, to: usize) -> f64 {
        self.pipes(from).up.delay_s + self.pipes(to).down.delay_s
    }

    /// Share of the packets from one rank to another that is lost at random.
    pub fn loss(&self, from: usize, to: usize) -> f64 {
        1.0 - (1.0 - self.pipes(from).up.loss) * (1.0 - self.pipes(to).down.loss)
    }

    /// Least rate of any pipe, in bits a second.
    pub fn least_rate(&self) -> Option<f64> {
        let pipes = self.unusual.values().chain([&self.usual]).flat_map(|pipes| [pipes.up, pipes.down]);
        pipes.filter_map(|pipe| pipe.bits_per_s).min_by(f64::total_cmp)
    }
}

impl Default for Costs {
    /// A transport that costs nothing, in packets of TCP over IPv4 with timestamps.
    fn default() -> Self {
        Costs {
            message_s: 0.0,
            send_s_per_byte: 0.0,
            receive_s_per_byte: 0.0,
            reduce_s_per_byte: 0.0,
            packet_overhead: 52.0,
            efficiency: 1.0,
            buffer_bytes: f64::from(1 << 20),
            window_bytes: f64::from(4 << 20),
            ahead_bytes: 0.0,
            connection_bytes_per_s: None,
            congestion: Congestion::default(),
            unevenness: 0.0,
            turn_s: 0.0,
        }
    }
}

impl Congestion {
    /// By the name of a congestion control, of the kernel or of QUIC.
    pub fn of(name: &str, of_quic: bool) -> Self {
        match (name.starts_with("bbr"), of_quic) {
            (true, _) => Congestion::Measured,
            (false, true) => Congestion::LossesWithoutRestart,
            (false, false) => Congestion::Losses,
        }
    }
}

impl Network {
    /// Payload bytes a second of a pipe; infinite where nothing limits it.
    pub fn goodput(&self, pipe: &Pipe) -> f64 {
        let Some(bits) = pipe.bits_per_s else { return f64::INFINITY };
        bits / 8.0 * self.payload_share() * self.costs.efficiency
    }

    /// The part of a packet that is payload.
    fn payload_share(&self) -> f64 {
        self.segment() / f64::from(self.link.mtu)
    }

    /// Payload bytes that pass a pipe at once after a pause.
    pub(crate) fn burst(&self, pipe: &Pipe) -> f64 {
        if pipe.bits_per_s.is_some() { pipe.burst_bytes * self.payload_share() } else { 0.0 }
    }

    /// Payload of a full packet, in bytes.
    pub(crate) fn segment(&self) -> f64 {
        (f64::from(self.link.mtu) - self.costs.packet_overhead).max(1.0)
    }

    /// There and back between two ranks, for a packet that waits nowhere.
    pub(crate) fn round_trip_s(&self, from: usize, to: usize) -> f64 {
        self.link.delay_s(from, to) + self.link.delay_s(to, from)
    }

    /// Most that a connection between two ranks carries in the long run, whatever the link's rate.
    pub(crate) fn connection_rate(&self, from: usize, to: usize) -> f64 {
        let rtt = self.round_trip_s(from, to);
        let of_window = if rtt < tcp::SHORTEST_ROUND_TRIP_S { f64::INFINITY } else { self.costs.window_bytes / rtt };
        let loss = self.link.loss(from, to);
        let under_loss = match self.costs.congestion {
            Congestion::Measured if loss < tcp::MOST_LOSS_OF_BBR => f64::INFINITY,
            _ => tcp::rate_under_loss(loss, self.segment(), rtt.max(2.0 * self.costs.message_s)),
        };
        under_loss.min(of_window).min(self.costs.connection_bytes_per_s.unwrap_or(f64::INFINITY))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn network(bits_per_s: f64, delay_s: f64) -> Network {
        Network {
            link: Link::even("test", Some(bits_per_s), delay_s),
            costs: Costs::default(),
            processors: Processors::Own { cores: 1.0 },
            threads: 1.0,
        }
    }

    #[test]
    fn a_link_that_carries_nothing_is_said() {
        assert!(network(1e9, 0.0).link.check(2).is_ok());
        let why = network(0.0, 0.0).link.check(2).unwrap_err();
        assert_eq!(why, "the link test delivers no packets from rank 0: its rate is 0");
        let mut link = network(1e9, 0.0).link;
        let mut pipes = link.usual;
        pipes.down.loss = 1.0;
        link.unusual.insert(1, pipes);
        let why = link.check(2).unwrap_err();
        assert_eq!(why, "the link test delivers no packets to rank 1: all packets are lost");
        assert!(link.check(1).is_ok(), "no such rank");
    }

    #[test]
    fn headers_take_their_part_of_a_rate() {
        let network = network(1e9, 0.0);
        assert!((network.goodput(&network.link.usual.up) - 125e6 * 1448.0 / 1500.0).abs() < 1.0);
        assert_eq!(network.goodput(&Pipe::default()), f64::INFINITY);
    }

    #[test]
    fn a_window_is_on_its_way_in_a_round_trip() {
        let rate = network(1e10, 0.05).connection_rate(0, 1);
        assert!((rate - f64::from(4 << 20) / 0.1).abs() < 1.0, "{rate}");
        assert_eq!(network(1e10, 0.0).connection_rate(0, 1), f64::INFINITY);
    }
}
