//! quinn's CUBIC and NewReno with two rules of the kernel's TCP.
//!
//! *Growth.* quinn lets a window grow by the acknowledgements that come while there is something left to send. When the last bytes of
//! a message are on their way there is nothing left, so the acknowledgements of its last round trip, most of them all, do not count,
//! although the window was full. Here a packet counts that was on its way when the window was in use: full, or, in slow start, more
//! than half full (as in Linux, `tcp_is_cwnd_limited`).
//!
//! *Pacing.* quinn spreads what the window allows over four fifths of a round trip. A message that just fits into the window therefore
//! takes that much longer to leave, 40 ms on a path of 50 ms, however fast the path is; the kernel's CUBIC sends it at once. Here the
//! rate is that at which acknowledgements come back while much is on its way, which is what the path carries, with a gain of 2
//! (that of Linux in slow start), where this is more than quinn's own.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use quinn::congestion::{Controller, ControllerFactory, ControllerMetrics};
use quinn_proto::RttEstimator;

/// Makes [`Paced`] controllers from those of another factory.
pub(crate) struct PacedFactory(pub(crate) Arc<dyn ControllerFactory + Send + Sync>);

impl ControllerFactory for PacedFactory {
    fn build(self: Arc<Self>, now: Instant, mtu: u16) -> Box<dyn Controller> {
        let inner = Arc::clone(&self.0).build(now, mtu);
        Box::new(Paced { inner, usage: WindowUsage::default(), rate: AckRate::default(), mtu: mtu.into() })
    }
}

/// A controller with these rules.
pub(crate) struct Paced {
    inner: Box<dyn Controller>,
    usage: WindowUsage,
    rate: AckRate,
    /// Bytes of a full datagram.
    mtu: u64,
}

impl Paced {
    /// Bytes that may be on their way.
    pub(crate) fn congestion_window(&self) -> u64 {
        self.inner.window()
    }
}

impl Controller for Paced {
    fn on_sent(&mut self, now: Instant, bytes: u64, last_packet_number: u64) {
        let metrics = self.inner.metrics();
        let in_slow_start = metrics.ssthresh.is_some_and(|threshold| metrics.congestion_window < threshold);
        self.usage.sent(now, bytes, metrics.congestion_window, in_slow_start, self.mtu);
        self.inner.on_sent(now, bytes, last_packet_number);
    }

    fn on_ack(&mut self, now: Instant, sent: Instant, bytes: u64, _app_limited: bool, rtt: &RttEstimator) {
        self.rate.acknowledged(now, bytes, rtt.get(), self.mtu);
        self.inner.on_ack(now, sent, bytes, !self.usage.was_in_use(sent), rtt);
    }

    fn on_end_acks(&mut self, now: Instant, in_flight: u64, app_limited: bool, largest_packet_num_acked: Option<u64>) {
        self.usage.in_flight = in_flight;
        self.inner.on_end_acks(now, in_flight, app_limited, largest_packet_num_acked);
    }

    fn on_congestion_event(&mut self, now: Instant, sent: Instant, is_persistent_congestion: bool, lost_bytes: u64) {
        self.usage.in_flight = self.usage.in_flight.saturating_sub(lost_bytes);
        self.inner.on_congestion_event(now, sent, is_persistent_congestion, lost_bytes);
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.mtu = new_mtu.into();
        self.inner.on_mtu_update(new_mtu);
    }

    /// What quinn compares with the bytes on their way, and paces by: in a round trip a quarter more than this. While there is room
    /// for a batch it is what the path carries in two round trips, if that is more than the congestion window.
    fn window(&self) -> u64 {
        let window = self.inner.window();
        if self.usage.in_flight + BATCH * self.mtu > window {
            window
        } else {
            window.max(self.rate.in_two_round_trips())
        }
    }

    fn metrics(&self) -> ControllerMetrics {
        self.inner.metrics()
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(Paced { inner: self.inner.clone_box(), ..*self })
    }

    fn initial_window(&self) -> u64 {
        self.inner.initial_window()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// Most datagrams that quinn 0.11 sends before it tells its controller of them.
const BATCH: u64 = 10;

/// A datagram of up to this many bytes brings acknowledgements and no part of a message: a message begins with a header of 64 bytes.
const ONLY_ACKS: u64 = 64;

/// Whether the window is what holds the sender back.
#[derive(Clone, Copy, Debug, Default)]
struct WindowUsage {
    /// Bytes on their way.
    in_flight: u64,
    /// When the window was in use last.
    in_use: Option<Instant>,
}

impl WindowUsage {
    fn sent(&mut self, now: Instant, bytes: u64, window: u64, in_slow_start: bool, mtu: u64) {
        if bytes <= ONLY_ACKS {
            return;
        }
        self.in_flight += bytes;
        // quinn sends nothing that would fill it to the last byte.
        let is_in_use = if in_slow_start { 2 * self.in_flight > window } else { self.in_flight + 2 * mtu > window };
        if is_in_use {
            self.in_use = Some(now);
        }
    }

    /// Whether it was while, or after, a packet that was `sent` then was on its way.
    fn was_in_use(&self, sent: Instant) -> bool {
        self.in_use.is_some_and(|last| sent <= last)
    }
}

/// The rate at which acknowledgements come while much is on its way.
#[derive(Clone, Copy, Debug, Default)]
struct AckRate {
    /// Bytes in a second; 0 where none has been seen.
    rate: f64,
    rtt: Duration,
    train: Option<Train>,
}

/// Acknowledgements that follow each other closely.
#[derive(Clone, Copy, Debug)]
struct Train {
    began: Instant,
    last: Instant,
    /// Bytes acknowledged after it began.
    bytes: u64,
}

/// A rate is taken from at least this many datagrams and this much time.
const SAMPLE_DATAGRAMS: u64 = 8;
const SAMPLE_TIME: Duration = Duration::from_micros(500);

/// What comes so soon after the first of a train was held up with it, by a thread that slept for example, and says nothing of the path.
const HELD_UP: Duration = Duration::from_micros(100);

/// A train ends with a pause of a quarter of a round trip, and not before this.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);

/// How much of the rate remains when a sample is lower.
const KEPT: f64 = 0.875;

impl AckRate {
    fn acknowledged(&mut self, now: Instant, bytes: u64, rtt: Duration, mtu: u64) {
        self.rtt = rtt;
        let pause = (rtt / 4).max(SHORTEST_PAUSE);
        let Some(train) = self.train.as_mut().filter(|train| now.saturating_duration_since(train.last) <= pause) else {
            self.train = Some(Train { began: now, last: now, bytes: 0 });
            return;
        };
        train.last = now;
        if now.saturating_duration_since(train.began) < HELD_UP {
            return;
        }
        train.bytes += bytes;
        let taken = now.saturating_duration_since(train.began);
        if train.bytes >= SAMPLE_DATAGRAMS * mtu && taken >= SAMPLE_TIME {
            self.rate = (train.bytes as f64 / taken.as_secs_f64()).max(self.rate * KEPT);
            *train = Train { began: now, last: now, bytes: 0 };
        }
    }

    /// Bytes, as many as quinn's pacer takes at most.
    fn in_two_round_trips(&self) -> u64 {
        ((2.0 * self.rate * self.rtt.as_secs_f64()) as u64).min(u32::MAX.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MTU: u64 = 1000;

    #[test]
    fn packets_count_that_were_on_their_way_when_the_window_was_in_use() {
        let began = Instant::now();
        let at = |millis| began + Duration::from_millis(millis);
        let mut usage = WindowUsage::default();
        usage.sent(at(0), 7 * MTU, 10 * MTU, false, MTU);
        assert!(!usage.was_in_use(at(0)));
        // No more than a packet fits into the rest.
        usage.sent(at(1), 2 * MTU, 10 * MTU, false, MTU);
        assert!(usage.was_in_use(at(0)) && usage.was_in_use(at(1)) && !usage.was_in_use(at(2)));
    }

    #[test]
    fn half_a_window_is_in_use_in_slow_start() {
        let now = Instant::now();
        let mut usage = WindowUsage::default();
        usage.sent(now, 5 * MTU, 10 * MTU, true, MTU);
        assert!(!usage.was_in_use(now));
        usage.sent(now, MTU, 10 * MTU, true, MTU);
        assert!(usage.was_in_use(now));
    }

    #[test]
    fn what_only_acknowledges_is_not_on_its_way() {
        let mut usage = WindowUsage::default();
        usage.sent(Instant::now(), ONLY_ACKS, MTU, true, MTU);
        assert_eq!(usage.in_flight, 0);
    }

    /// Acknowledges `count` times two packets, one `spacing` after the other.
    fn acknowledge(rate: &mut AckRate, from: Instant, count: u32, spacing: Duration) -> Instant {
        let ends = (1..=count).map(|number| from + spacing * number);
        ends.inspect(|now| rate.acknowledged(*now, 2 * MTU, Duration::from_millis(50), MTU)).last().unwrap()
    }

    #[test]
    fn the_rate_is_that_of_acknowledgements_that_follow_each_other() {
        let mut rate = AckRate::default();
        let spacing = Duration::from_micros(160);
        let end = acknowledge(&mut rate, Instant::now(), 30, spacing);
        let expected = 2.0 * MTU as f64 / spacing.as_secs_f64();
        assert!((rate.rate / expected - 1.0).abs() < 0.2, "{}", rate.rate);
        assert_eq!(rate.in_two_round_trips(), (2.0 * rate.rate * 0.05) as u64);
        // Pauses between messages say nothing, and slower ones count a little.
        let before = rate.rate;
        let end = acknowledge(&mut rate, end + Duration::from_secs(1), 3, Duration::from_millis(20));
        assert_eq!(rate.rate, before);
        acknowledge(&mut rate, end, 6, 10 * spacing);
        assert_eq!(rate.rate, before * KEPT);
    }

    #[test]
    fn acknowledgements_that_were_held_up_together_are_not_taken_for_a_fast_path() {
        let mut rate = AckRate::default();
        let end = acknowledge(&mut rate, Instant::now(), 50, Duration::from_nanos(1));
        assert_eq!(rate.rate, 0.0);
        acknowledge(&mut rate, end, 30, Duration::from_micros(160));
        assert!(rate.rate < 15e6, "{}", rate.rate);
    }
}
