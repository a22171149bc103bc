//! What the kernel counts at this end: bytes and packets of an interface, and what its protocols say.

use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rig::stats::median;

/// What an interface has received until a moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Received {
    at: Instant,
    bytes: u64,
    packets: u64,
}

/// Reads an interface's counters over and over until it is told to stop.
pub(super) struct Sampler {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Received>>,
}

/// How often it reads.
const EVERY: Duration = Duration::from_millis(50);

/// A sample spans so many packets at least, so that one more or less does not matter.
const PACKETS: u64 = 200;

impl Sampler {
    /// # Errors
    /// There is no such interface, or no thread.
    pub(super) fn start(interface: &str) -> io::Result<Self> {
        let (stop, interface) = (Arc::new(AtomicBool::new(false)), interface.to_string());
        received(&interface)?;
        let is_over = stop.clone();
        let sample = move || {
            let mut samples = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                samples.extend(received(&interface));
                thread::sleep(EVERY);
            }
            samples
        };
        Ok(Sampler { stop, thread: thread::Builder::new().name("sampler".into()).spawn(sample)? })
    }

    pub(super) fn stop(self) -> Vec<Received> {
        self.stop.store(true, Ordering::Relaxed);
        // It cannot panic.
        self.thread.join().unwrap_or_default()
    }
}

/// The median rate over samples between two moments, in bits a second of IP packets; `header` are bytes of each packet that are not.
pub(super) fn rate(samples: &[Received], from: Instant, to: Instant, header: u64) -> Option<f64> {
    let within = samples.iter().filter(|sample| (from..=to).contains(&sample.at));
    let mut rates = Vec::new();
    let mut last: Option<&Received> = None;
    for sample in within {
        let Some(before) = last else {
            last = Some(sample);
            continue;
        };
        let packets = sample.packets.saturating_sub(before.packets);
        // An end that hears nothing has a rate as well.
        let is_long = sample.at - before.at >= 10 * EVERY;
        if packets >= PACKETS || is_long {
            let bytes = sample.bytes.saturating_sub(before.bytes).saturating_sub(packets * header);
            rates.push(bytes as f64 * 8.0 / (sample.at - before.at).as_secs_f64());
            last = Some(sample);
        }
    }
    median(&rates)
}

fn received(interface: &str) -> io::Result<Received> {
    // That of the network namespace of this process, whatever is mounted elsewhere.
    let text = fs::read_to_string("/proc/self/net/dev")?;
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix(interface)?.strip_prefix(':'));
    let mut numbers = line.into_iter().flat_map(str::split_whitespace).map_while(|number| number.parse::<u64>().ok());
    match (numbers.next(), numbers.next()) {
        (Some(bytes), Some(packets)) => Ok(Received { at: Instant::now(), bytes, packets }),
        _ => Err(io::Error::other(format!("this machine has no interface {interface}"))),
    }
}

/// A counter of `/proc/net/snmp`, of this network namespace.
pub(super) fn counter(protocol: &str, name: &str) -> Option<u64> {
    value(&fs::read_to_string("/proc/self/net/snmp").ok()?, protocol, name)
}

/// The first line of a protocol has names, the second one values.
fn value(text: &str, protocol: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(protocol)?.strip_prefix(':'));
    let place = lines.next()?.split_whitespace().position(|found| found == name)?;
    lines.next()?.split_whitespace().nth(place)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_the_median_of_what_samples_say() {
        let began = Instant::now();
        let sample = |number: u32, bytes, packets| Received { at: began + number * EVERY, bytes, packets };
        // 1 MB every 50 ms, with one gap, and headers of 10 bytes.
        let samples = [
            sample(0, 0, 0),
            sample(1, 1_000_000, 1000),
            sample(2, 2_000_000, 2000),
            sample(3, 2_100_000, 2300),
            sample(4, 3_100_000, 3300),
        ];
        let rate = |from, to| rate(&samples, began + from * EVERY, began + to * EVERY, 10);
        assert_eq!(rate(0, 4), Some(990_000.0 * 8.0 / 0.05));
        assert_eq!(rate(0, 0), None);
        assert!(rate(2, 3).unwrap() < 20e6);
    }

    #[test]
    fn the_kernel_is_understood() {
        let text = "Udp: InDatagrams NoPorts InErrors\nUdp: 1 2 -3\nTcp: RetransSegs\nTcp: 7\n";
        assert_eq!((value(text, "Tcp", "RetransSegs"), value(text, "Udp", "NoPorts")), (Some(7), Some(2)));
        assert_eq!(
            (value(text, "Udp", "InErrors"), value(text, "Udp", "x"), value(text, "Ip", "x")),
            (None, None, None)
        );
        assert!(counter("Tcp", "RetransSegs").is_some());
        assert!(received("lo").is_ok() && received("l").is_err());
    }

    #[test]
    fn a_sampler_ends_when_it_is_told_to() {
        let sampler = Sampler::start("lo").unwrap();
        thread::sleep(2 * EVERY);
        assert!(!sampler.stop().is_empty());
        assert!(Sampler::start("no-such-interface").is_err());
    }
}
