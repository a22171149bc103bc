//! What an emulated link is told to be.

use std::collections::HashSet;
use std::net::Ipv4Addr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::link::MTU;

/// An emulated link: a network of ends that all reach each other. A packet from one end to another passes the first one's `up` and then
/// the second one's `down`, so that what several send to one queues in front of its `down`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct EmulatorSpec {
    /// The same seed makes the same decisions, packet by packet of each pipe.
    pub seed: u64,
    /// Largest packet in bytes, with the IP header.
    pub mtu: u32,
    pub ends: Vec<EndSpec>,
}

/// One end: a device in a network namespace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct EndSpec {
    /// A name that `ip netns` knows.
    pub namespace: String,
    /// Name of the device that is made there.
    pub device: String,
    pub address: Ipv4Addr,
    /// Bits of the address that are the same at all ends.
    pub prefix: u8,
    /// What the end sends passes this first.
    pub up: PipeSpec,
    /// What the end receives passes this last.
    pub down: PipeSpec,
}

/// One direction of one end. The default is a pipe that does nothing.
///
/// A packet waits for the rate, takes its turn, and is then lost or on its way for the delay; so what is lost has used the rate.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PipeSpec {
    /// Of IP packets, headers included; `None` for no limit.
    pub rate_bits_per_s: Option<u64>,
    /// One way.
    pub delay: Duration,
    /// The delay of each packet is off by a time between minus and plus this, all equally likely. Packets keep their order: one that
    /// would overtake arrives together with the one before it. So at many packets per jitter, delays draw near delay + jitter.
    pub jitter: Duration,
    pub loss: Loss,
    /// How likely it is that a packet is held back, so that later ones overtake it, and for how long.
    pub reorder_probability: f64,
    pub reorder_by: Duration,
    /// How likely it is that a packet arrives twice.
    pub duplicate_probability: f64,
    /// IP bytes that may wait for the rate, the packet that is being sent included; what comes on top is dropped. `None` for no limit.
    pub queue_bytes: Option<u64>,
}

/// How packets get lost on their way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Loss {
    #[default]
    None,
    /// Each packet for itself.
    Random { probability: f64 },
    /// In bursts (Gilbert and Elliott): before each packet, a burst begins with probability `enter` and one that is on ends with
    /// `leave`; in a burst each packet is lost with `loss_in_burst`. So bursts last 1/leave packets on average, and
    /// enter/(enter + leave) of all packets fall into one.
    Bursty { enter: f64, leave: f64, loss_in_burst: f64 },
}

/// Far more than any link takes, and far from where times overflow.
const LONGEST: Duration = Duration::from_secs(60);
const RATES: std::ops::RangeInclusive<u64> = 8_000..=1_000_000_000_000;
/// The kernel's, without the zero at the end.
const LONGEST_DEVICE_NAME: usize = 15;
const MOST_ENDS: usize = 250;

impl EmulatorSpec {
    /// Whether there can be such a link.
    ///
    /// # Errors
    /// What cannot be, for the user.
    pub(crate) fn check(&self) -> Result<(), String> {
        if !MTU.contains(&self.mtu) {
            return Err(format!("a link's MTU of {} bytes must be from {} to {}", self.mtu, MTU.start(), MTU.end()));
        }
        if !(2..=MOST_ENDS).contains(&self.ends.len()) {
            return Err(format!("an emulated link can have 2 to {MOST_ENDS} ends, not {}", self.ends.len()));
        }
        let (mut addresses, mut devices) = (HashSet::new(), HashSet::new());
        for (number, end) in self.ends.iter().enumerate() {
            let of_end = |why: String| format!("end {number} of the link: {why}");
            end.check(self.mtu).map_err(of_end)?;
            if !addresses.insert(end.address) {
                return Err(of_end(format!("{} is the address of another end, too", end.address)));
            }
            if !devices.insert((&end.namespace, &end.device)) {
                return Err(of_end(format!("{} in {} is the device of another end, too", end.device, end.namespace)));
            }
            if end.network() != self.ends[0].network() {
                let first = &self.ends[0];
                return Err(of_end(format!(
                    "{}/{} is not in the network of end 0, which is {}/{}",
                    end.address, end.prefix, first.address, first.prefix
                )));
            }
        }
        Ok(())
    }
}

impl EndSpec {
    fn check(&self, mtu: u32) -> Result<(), String> {
        // They become a path and arguments of a program.
        let is_name = |name: &str| {
            let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.chars().all(fits)
        };
        if !is_name(&self.namespace) || self.namespace.len() > 255 {
            return Err(format!("{:?} is not the name of a network namespace", self.namespace));
        }
        if !is_name(&self.device) || self.device.len() > LONGEST_DEVICE_NAME {
            return Err(format!(
                "{:?} is not the name of a device, which must have 1 to {LONGEST_DEVICE_NAME} letters or digits",
                self.device
            ));
        }
        if !(1..=30).contains(&self.prefix) {
            return Err(format!("a prefix of {} bits is not from 1 to 30", self.prefix));
        }
        let special = self.address.is_unspecified() || self.address.is_loopback() || self.address.is_multicast();
        let host = self.address.to_bits() & (u32::MAX >> self.prefix);
        if special || self.address.is_broadcast() || host == 0 || host == u32::MAX >> self.prefix {
            return Err(format!("{}/{} is not an address of a host", self.address, self.prefix));
        }
        self.up.check(mtu).map_err(|why| format!("what it sends: {why}"))?;
        self.down.check(mtu).map_err(|why| format!("what it receives: {why}"))
    }

    fn network(&self) -> (u32, u8) {
        (self.address.to_bits() & !(u32::MAX >> self.prefix), self.prefix)
    }
}

impl PipeSpec {
    /// Whether there can be such a pipe for packets of up to `mtu` bytes.
    ///
    /// # Errors
    /// What cannot be, for the user.
    pub fn check(&self, mtu: u32) -> Result<(), String> {
        if let Some(rate) = self.rate_bits_per_s
            && !RATES.contains(&rate)
        {
            return Err(format!("a rate of {rate} bit/s is out of range; a link can have 8 kbit/s to 1000 Gbit/s"));
        }
        for (name, time) in [("delay", self.delay), ("jitter", self.jitter), ("reorder_by", self.reorder_by)] {
            if time > LONGEST {
                return Err(format!("a {name} of {time:?} is out of range; {LONGEST:?} is the most"));
            }
        }
        if self.jitter > self.delay {
            return Err(format!("a jitter of {:?} is more than the delay, {:?}", self.jitter, self.delay));
        }
        probability("reorder_probability", self.reorder_probability)?;
        probability("duplicate_probability", self.duplicate_probability)?;
        if (self.reorder_probability > 0.0) != (self.reorder_by > Duration::ZERO) {
            return Err("reordering needs both reorder_probability and reorder_by".into());
        }
        match (self.queue_bytes, self.rate_bits_per_s) {
            (Some(_), None) => {
                return Err("queue_bytes needs a rate: without a rate no packet is queued".into());
            }
            (Some(bytes), _) if bytes < u64::from(mtu) => {
                return Err(format!("a queue of {bytes} bytes cannot hold a packet of {mtu} bytes"));
            }
            _ => {}
        }
        self.loss.check()
    }
}

impl Loss {
    fn check(&self) -> Result<(), String> {
        match *self {
            Loss::None => Ok(()),
            Loss::Random { probability: loss } => probability("loss", loss),
            Loss::Bursty { enter, leave, loss_in_burst } => {
                probability("a burst's enter", enter)?;
                probability("a burst's leave", leave)?;
                probability("loss_in_burst", loss_in_burst)?;
                if enter > 0.0 && leave == 0.0 {
                    return Err("a burst's leave is 0: the first burst would never end".into());
                }
                Ok(())
            }
        }
    }

    /// The share of packets that get lost in the long run.
    pub fn average(&self) -> f64 {
        match *self {
            Loss::None => 0.0,
            Loss::Random { probability } => probability,
            Loss::Bursty { enter: 0.0, .. } => 0.0,
            Loss::Bursty { enter, leave, loss_in_burst } => enter / (enter + leave) * loss_in_burst,
        }
    }
}

fn probability(name: &str, value: f64) -> Result<(), String> {
    if (0.0..=1.0).contains(&value) { Ok(()) } else { Err(format!("{name}: {value} is not a probability from 0 to 1")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn two_ends() -> EmulatorSpec {
        let end = |number: u8| EndSpec {
            namespace: format!("bench-link-1-1-{number}"),
            device: "link0".into(),
            address: Ipv4Addr::new(10, 77, 0, number + 1),
            prefix: 24,
            up: PipeSpec::default(),
            down: PipeSpec::default(),
        };
        EmulatorSpec { seed: 1, mtu: 1500, ends: vec![end(0), end(1)] }
    }

    fn refused(change: impl Fn(&mut EmulatorSpec)) -> String {
        let mut spec = two_ends();
        change(&mut spec);
        spec.check().unwrap_err()
    }

    fn refused_pipe(pipe: PipeSpec) -> String {
        let why = refused(|spec| spec.ends[1].down = pipe.clone());
        assert!(why.contains("end 1") && why.contains("receives"), "{why}");
        why
    }

    #[test]
    fn a_link_survives_its_text() {
        let mut spec = two_ends();
        spec.ends[0].up = PipeSpec {
            rate_bits_per_s: Some(100_000_000),
            delay: Duration::from_millis(25),
            jitter: Duration::from_micros(1500),
            loss: Loss::Bursty { enter: 0.001, leave: 0.25, loss_in_burst: 0.5 },
            reorder_probability: 0.01,
            reorder_by: Duration::from_millis(3),
            duplicate_probability: 0.1,
            queue_bytes: Some(1500),
        };
        spec.check().unwrap();
        let text = serde_json::to_string(&spec).unwrap();
        assert!(!text.contains('\n'));
        assert_eq!(serde_json::from_str::<EmulatorSpec>(&text).unwrap(), spec);
        assert_eq!(serde_json::from_str::<PipeSpec>("{}").unwrap(), PipeSpec::default());
    }

    #[test]
    fn impossible_links_are_refused() {
        assert!(refused(|spec| spec.mtu = 500).contains("MTU of 500"));
        assert!(refused(|spec| spec.ends.truncate(1)).contains("2 to 250 ends, not 1"));
        assert!(refused(|spec| spec.ends[1].address = spec.ends[0].address).contains("another end"));
        assert!(refused(|spec| spec.ends[1].namespace = spec.ends[0].namespace.clone()).contains("another end"));
        assert!(refused(|spec| spec.ends[1].address = Ipv4Addr::new(10, 78, 0, 2)).contains("not in the network"));
        assert!(refused(|spec| spec.ends[1].prefix = 25).contains("not in the network"));
        assert!(refused(|spec| spec.ends[0].prefix = 32).contains("prefix of 32"));
        for address in [[10, 77, 0, 0], [10, 77, 0, 255], [127, 0, 0, 1], [224, 0, 0, 1], [0, 0, 0, 0]] {
            assert!(refused(|spec| spec.ends[0].address = address.into()).contains("not an address of a host"));
        }
        for name in ["", "../x", "a/b", "-a", "a b", ".."] {
            assert!(
                refused(|spec| spec.ends[0].namespace = name.into()).contains("not the name of a network"),
                "{name}"
            );
            assert!(refused(|spec| spec.ends[0].device = name.into()).contains("not the name of a device"), "{name}");
        }
        assert!(refused(|spec| spec.ends[0].device = "sixteen-letters-".into()).contains("1 to 15"));
    }

    #[test]
    fn impossible_pipes_are_refused() {
        let ms = Duration::from_millis;
        let pipe = PipeSpec::default;
        assert!(refused_pipe(PipeSpec { rate_bits_per_s: Some(0), ..pipe() }).contains("0 bit/s"));
        assert!(refused_pipe(PipeSpec { delay: ms(70_000), ..pipe() }).contains("delay of 70s"));
        assert!(refused_pipe(PipeSpec { delay: ms(1), jitter: ms(2), ..pipe() }).contains("more than the delay"));
        assert!(refused_pipe(PipeSpec { reorder_probability: 0.1, ..pipe() }).contains("both"));
        assert!(refused_pipe(PipeSpec { reorder_by: ms(1), ..pipe() }).contains("both"));
        assert!(refused_pipe(PipeSpec { queue_bytes: Some(9000), ..pipe() }).contains("needs a rate"));
        let small = PipeSpec { rate_bits_per_s: Some(8_000), queue_bytes: Some(1499), ..pipe() };
        assert!(refused_pipe(small).contains("cannot hold a packet"));
        for bad in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            assert!(refused_pipe(PipeSpec { duplicate_probability: bad, ..pipe() }).contains("not a probability"));
            let loss = Loss::Random { probability: bad };
            assert!(refused_pipe(PipeSpec { loss, ..pipe() }).contains("not a probability"));
            let loss = Loss::Bursty { enter: 0.1, leave: bad, loss_in_burst: 1.0 };
            assert!(refused_pipe(PipeSpec { loss, ..pipe() }).contains("not a probability"));
        }
        let endless = Loss::Bursty { enter: 0.1, leave: 0.0, loss_in_burst: 1.0 };
        assert!(refused_pipe(PipeSpec { loss: endless, ..pipe() }).contains("never end"));
    }

    #[test]
    fn the_average_loss_is_known() {
        assert_eq!(Loss::None.average(), 0.0);
        assert_eq!(Loss::Random { probability: 0.01 }.average(), 0.01);
        assert_eq!(Loss::Bursty { enter: 0.1, leave: 0.3, loss_in_burst: 0.5 }.average(), 0.125);
        assert_eq!(Loss::Bursty { enter: 0.0, leave: 0.0, loss_in_burst: 1.0 }.average(), 0.0);
    }
}
