//! quinn's CUBIC and NewReno with five rules of the kernel's TCP.
//!
//! *Growth.* quinn lets a window grow by the acknowledgements that come while there is something left to send. When the last bytes of
//! a message are on their way there is nothing left, so the acknowledgements of its last round trip, most of them all, do not count,
//! although the window was full. Here a packet counts that was on its way when the window was in use: full, or, in slow start, more
//! than half full (as in Linux, `tcp_is_cwnd_limited`).
//!
//! *Pacing.* quinn spreads what the window allows over four fifths of a round trip. A message that just fits into the window therefore
//! takes that much longer to leave, 40 ms on a path of 50 ms, however fast the path is; the kernel's CUBIC sends it at once. Here the
//! rate is that at which acknowledgements come back while much is on its way, which is what the path carries, with the gains of Linux:
//! 2 in slow start, or of the window in a round trip if that is more, and 1.2 after it. A large window that is empty is not sent at
//! quinn's rate either then, which would fill the queue of the path before the first acknowledgement comes. On a path of a few
//! milliseconds nothing is paced: a timer of a millisecond, of a thread that shares a processor with those that compute, is late by
//! more than quinn's pacer makes up for, and a window is no more than such a path and its queue hold.
//!
//! *Slow start.* quinn's goes on until up to half a window is lost. Here, while the window holds more than what the path has shown to carry in a
//! round trip without a queue, it grows by a packet in a round trip, as after slow start; Linux ends slow start there, by the trains of
//! acknowledgements of HyStart.
//!
//! *Clock.* CUBIC's window grows with the time since the last loss. With quinn's that is all time, so that after a pause it grows as in slow
//! start. Here the clock stops while nothing is on its way (RFC 9438, section 5.8), much as in Linux.
//!
//! *Loss.* After a loss the window is shorter than what is on its way. quinn sends nothing then until enough of that is acknowledged, and what
//! was lost waits too, for up to a third of a round trip. Here a datagram is sent at once, which is that one (RFC 9002, section 7.3.2).
//!
//! *Allowance.* quinn gets no more of messages than fits into the window: see [`allowance`](crate::allowance).

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use quinn::congestion::{Controller, ControllerFactory, ControllerMetrics};
use quinn_proto::RttEstimator;

use crate::allowance::{Allowance, Held};

/// Makes [`Paced`] controllers from those of another factory.
pub(crate) struct PacedFactory {
    pub(crate) inner: Arc<dyn ControllerFactory + Send + Sync>,
    /// Bytes that a connection may hold until they are acknowledged, whatever the window.
    pub(crate) send_window: u64,
}

impl ControllerFactory for PacedFactory {
    fn build(self: Arc<Self>, now: Instant, mtu: u16) -> Box<dyn Controller> {
        let inner = Arc::clone(&self.inner).build(now, mtu);
        let clock = SendingClock::new(now);
        let (usage, rate, slow_growth) = (WindowUsage::default(), AckRate::default(), SlowGrowth::default());
        let (held, allowance) = (Held::default(), Allowance::new(self.send_window));
        let paced =
            Paced { inner, usage, rate, slow_growth, clock, held, allowance, mtu: mtu.into(), sends_again: false };
        paced.allow();
        Box::new(paced)
    }
}

/// A controller with these rules.
pub(crate) struct Paced {
    inner: Box<dyn Controller>,
    usage: WindowUsage,
    rate: AckRate,
    slow_growth: SlowGrowth,
    clock: SendingClock,
    held: Held,
    allowance: Arc<Allowance>,
    /// Bytes of a full datagram.
    mtu: u64,
    /// Something was lost, and nothing has been sent since.
    sends_again: bool,
}

impl Paced {
    /// The allowance of a connection with such a controller; none for others.
    pub(crate) fn allowance(controller: Box<dyn Controller>) -> Option<Arc<Allowance>> {
        Some(controller.into_any().downcast::<Paced>().ok()?.allowance)
    }

    fn allow(&self) {
        self.allowance.allow(self.inner.window(), self.mtu, self.held.bytes());
    }

    /// Bytes that may be on their way.
    pub(crate) fn congestion_window(&self) -> u64 {
        self.inner.window()
    }

    fn is_in_slow_start(&self) -> bool {
        self.would_start_slowly() && !self.fills_the_path()
    }

    /// Whether the window is longer than the path, if that is known.
    fn fills_the_path(&self) -> bool {
        self.rate.is_exceeded_by(self.inner.window().saturating_sub(LEAST_WINDOW * self.mtu))
    }

    /// Whether the inner controller takes this for slow start.
    fn would_start_slowly(&self) -> bool {
        let metrics = self.inner.metrics();
        metrics.ssthresh.is_some_and(|threshold| metrics.congestion_window < threshold)
    }
}

impl Controller for Paced {
    fn on_sent(&mut self, now: Instant, bytes: u64, last_packet_number: u64) {
        if bytes > ONLY_ACKS {
            self.clock.sent(now, self.usage.in_flight == 0);
            self.usage.sent(now, bytes, self.inner.window(), self.is_in_slow_start(), self.mtu);
            self.sends_again = false;
        }
        self.inner.on_sent(self.clock.at(now), bytes, last_packet_number);
    }

    fn on_ack(&mut self, now: Instant, sent: Instant, bytes: u64, _app_limited: bool, rtt: &RttEstimator) {
        (self.rate.rtt, self.rate.shortest_rtt) = (rtt.get(), rtt.min());
        self.rate.acknowledged(now, sent, bytes, self.mtu);
        self.held.acknowledged(sent, bytes);
        let (now, sent_at, is_in_use) = (self.clock.at(now), self.clock.packet(now, sent), self.usage.was_in_use(sent));
        let bytes = if is_in_use && self.would_start_slowly() && self.fills_the_path() {
            self.slow_growth.acknowledged(bytes, self.inner.window(), self.mtu)
        } else {
            bytes
        };
        self.inner.on_ack(now, sent_at, bytes, !is_in_use, rtt);
        self.allow();
    }

    fn on_end_acks(&mut self, now: Instant, in_flight: u64, app_limited: bool, largest_packet_num_acked: Option<u64>) {
        self.usage.in_flight = in_flight;
        if in_flight == 0 {
            self.clock.rest(now);
        }
        self.inner.on_end_acks(self.clock.at(now), in_flight, app_limited, largest_packet_num_acked);
        self.allow();
    }

    fn on_congestion_event(&mut self, now: Instant, sent: Instant, is_persistent_congestion: bool, lost_bytes: u64) {
        self.usage.in_flight = self.usage.in_flight.saturating_sub(lost_bytes);
        let (inner_now, inner_sent) = (self.clock.at(now), self.clock.packet(now, sent));
        self.inner.on_congestion_event(inner_now, inner_sent, is_persistent_congestion, lost_bytes);
        self.clock.lost(now, sent);
        // None are where a router has only marked a datagram.
        if lost_bytes > 0 {
            self.held.lost(now, sent, lost_bytes, self.mtu);
            self.sends_again = true;
        }
        self.allow();
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.mtu = new_mtu.into();
        self.inner.on_mtu_update(new_mtu);
        self.allow();
    }

    /// What quinn compares with the bytes on their way, and paces by: in a round trip a quarter more than this. While there is room for a
    /// batch it is what the pacing asks for.
    fn window(&self) -> u64 {
        let window = self.inner.window();
        let in_flight = self.usage.in_flight;
        if in_flight + BATCH * self.mtu > window {
            // quinn sends nothing, however short it is, while a full datagram would make it reach this.
            let most = if self.sends_again { window.max(in_flight + 1) } else { window };
            return most + self.mtu;
        }
        if self.rate.shortest_rtt < SHORTEST_PACED {
            return UNPACED;
        }
        if self.is_in_slow_start() {
            let twice = (SLOW_START_GAIN / QUINNS_GAIN * window as f64) as u64;
            return twice.max(self.rate.window_for(SLOW_START_GAIN));
        }
        if self.rate.rate == 0.0 {
            return window;
        }
        // What was measured may be less than the path carries: then no less than half of quinn's rate. And with less than is on its way and may
        // be sent in one go, quinn would take the window for used up.
        let least = (window / 2).max(in_flight + 2 * BATCH * self.mtu);
        self.rate.window_for(AVOIDANCE_GAIN).max(least)
    }

    fn metrics(&self) -> ControllerMetrics {
        self.inner.metrics()
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(Paced {
            inner: self.inner.clone_box(),
            held: self.held.clone(),
            allowance: self.allowance.clone(),
            ..*self
        })
    }

    fn initial_window(&self) -> u64 {
        self.inner.initial_window()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// A path whose round trip without a queue is shorter is not paced, and its window may be as long as if it were this: threads that answer late
/// make it so.
const SHORTEST_PACED: Duration = Duration::from_millis(5);

/// quinn's pacer lets a window of more than 4 GiB pass.
const UNPACED: u64 = u64::MAX;

/// Most datagrams that quinn 0.11 sends before it tells its controller of them.
const BATCH: u64 = 10;

/// A datagram of up to this many bytes brings acknowledgements and no part of a message: a message begins with a header of 64 bytes.
const ONLY_ACKS: u64 = 64;

/// Of a window that is used, no more than this part and four datagrams is not.
const UNUSED_SHARE: u64 = 8;

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
        self.in_flight += bytes;
        // What is allowed does not fill it to the last byte, and a writer waits until there is room for a piece.
        let is_full = self.in_flight + window / UNUSED_SHARE + 4 * mtu > window;
        let is_in_use = if in_slow_start { 2 * self.in_flight > window } else { is_full };
        if is_in_use {
            self.in_use = Some(now);
        }
    }

    /// Whether it was while, or after, a packet that was `sent` then was on its way.
    fn was_in_use(&self, sent: Instant) -> bool {
        self.in_use.is_some_and(|last| sent <= last)
    }
}

/// A window that exceeds the path by no more is never too long (that of HyStart, in datagrams).
const LEAST_WINDOW: u64 = 16;

/// A window that holds so many times what the path carries in a round trip fills it, whatever the measured rate lacks of the true one. In slow
/// start twice the window is sent in a round trip, so as long as the path carries all that is sent, its window does not come near this.
const EXCESS: f64 = 1.5;

/// A window that grows by a datagram in a round trip although its controller is in slow start.
#[derive(Clone, Copy, Debug, Default)]
struct SlowGrowth {
    /// By how much it has grown, less what the controller knows of; bytes.
    grown: f64,
}

impl SlowGrowth {
    /// What to tell the controller, which adds to its window what was acknowledged.
    fn acknowledged(&mut self, acknowledged: u64, window: u64, mtu: u64) -> u64 {
        self.grown += acknowledged as f64 * mtu as f64 / window.max(1) as f64;
        let whole = self.grown as u64;
        self.grown -= whole as f64;
        whole
    }
}

/// The time in which something is on its way, on which the inner controller runs. Linux's stops when the last packet of a message is sent
/// (`bictcp_cwnd_event`); but there acknowledgements alone let the window grow of the Reno that CUBIC is to keep up with, and in quinn this
/// clock does.
#[derive(Clone, Copy, Debug)]
struct SendingClock {
    /// How long nothing was sent, in all.
    stopped: Duration,
    /// Since when nothing is on its way. What only asks whether the peer is there, and its answer, do not wake the clock.
    resting_since: Option<Instant>,
    /// The latest time that it has shown: it does not go back.
    shown: Instant,
    /// When a loss was answered last; by this clock too.
    lost: Option<(Instant, Instant)>,
}

impl SendingClock {
    fn new(now: Instant) -> Self {
        SendingClock { stopped: Duration::ZERO, resting_since: Some(now), shown: now, lost: None }
    }

    /// Something is sent, `after_pause` when nothing was on its way before.
    fn sent(&mut self, now: Instant, after_pause: bool) {
        if after_pause {
            self.stopped += now.saturating_duration_since(self.resting_since.unwrap_or(now));
        }
        self.resting_since = None;
    }

    /// Nothing is on its way any more.
    fn rest(&mut self, now: Instant) {
        self.resting_since.get_or_insert(now);
    }

    /// What it shows.
    fn at(&mut self, now: Instant) -> Instant {
        let now = self.resting_since.map_or(now, |since| since.min(now));
        self.shown = self.shown.max(now.checked_sub(self.stopped).unwrap_or(now));
        self.shown
    }

    /// When a packet was `sent`, for a controller that only compares this with when it answered a loss last.
    fn packet(&mut self, now: Instant, sent: Instant) -> Instant {
        match self.lost {
            Some((lost, shown)) if sent <= lost => shown,
            _ => self.at(now) + Duration::from_nanos(1),
        }
    }

    /// A packet that was `sent` then is lost. One loss is answered for all packets that were on their way.
    fn lost(&mut self, now: Instant, sent: Instant) {
        if self.lost.is_none_or(|(lost, _)| sent > lost) {
            self.lost = Some((now, self.at(now)));
        }
    }
}

/// The rate at which acknowledgements come while much is on its way.
#[derive(Clone, Copy, Debug, Default)]
struct AckRate {
    /// Bytes in a second; 0 where none has been seen.
    rate: f64,
    rtt: Duration,
    shortest_rtt: Duration,
    train: Option<Train>,
}

/// Acknowledgements that follow each other closely.
#[derive(Clone, Copy, Debug)]
struct Train {
    began: Instant,
    last: Instant,
    /// When the packet was sent that it began with.
    sent: Instant,
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

/// Pacing rates by what the path carries, as in Linux (`tcp_pacing_ss_ratio`, `tcp_pacing_ca_ratio`).
const SLOW_START_GAIN: f64 = 2.0;
const AVOIDANCE_GAIN: f64 = 1.2;

/// That of quinn's pacer by a window in each round trip.
const QUINNS_GAIN: f64 = 1.25;

/// How much of the rate remains when a sample is lower.
const KEPT: f64 = 0.875;

impl AckRate {
    fn acknowledged(&mut self, now: Instant, sent: Instant, bytes: u64, mtu: u64) {
        let pause = (self.rtt / 4).max(SHORTEST_PAUSE);
        let Some(train) = self.train.as_mut().filter(|train| now.saturating_duration_since(train.last) <= pause) else {
            self.train = Some(Train { began: now, last: now, sent, bytes: 0 });
            return;
        };
        train.last = now;
        if now.saturating_duration_since(train.began) < HELD_UP {
            return;
        }
        train.bytes += bytes;
        let taken = now.saturating_duration_since(train.began);
        if train.bytes >= SAMPLE_DATAGRAMS * mtu && taken >= SAMPLE_TIME {
            // Where acknowledgements were held up, or some were lost, more comes at once than the path carries, but no more than was sent.
            let taken = taken.max(sent.saturating_duration_since(train.sent));
            self.rate = (train.bytes as f64 / taken.as_secs_f64()).max(self.rate * KEPT);
            *train = Train { began: now, last: now, sent, bytes: 0 };
        }
    }

    /// Whether a window is larger than what can be on the path without a queue, if that is known.
    fn is_exceeded_by(&self, window: u64) -> bool {
        let rtt = self.shortest_rtt.max(SHORTEST_PACED);
        self.rate > 0.0 && window as f64 > EXCESS * self.rate * rtt.as_secs_f64()
    }

    /// The window by which quinn paces at `gain` times this rate; as much as its pacer takes at most.
    fn window_for(&self, gain: f64) -> u64 {
        ((gain / QUINNS_GAIN * self.rate * self.rtt.as_secs_f64()) as u64).min(u32::MAX.into())
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
        usage.sent(at(0), 80 * MTU, 100 * MTU, false, MTU);
        assert!(!usage.was_in_use(at(0)));
        // No more than the margin of what is allowed is left.
        usage.sent(at(1), 5 * MTU, 100 * MTU, false, MTU);
        assert!(usage.was_in_use(at(0)) && usage.was_in_use(at(1)) && !usage.was_in_use(at(2)));
    }

    fn paced(now: Instant) -> Box<Paced> {
        let inner = Arc::new(quinn::congestion::CubicConfig::default());
        let factory = Arc::new(PacedFactory { inner, send_window: 1 << 22 });
        factory.build(now, MTU as u16).into_any().downcast::<Paced>().unwrap()
    }

    #[test]
    fn one_datagram_is_sent_at_once_after_a_loss() {
        let began = Instant::now();
        let mut paced = paced(began);
        let window = paced.congestion_window();
        paced.on_sent(began, window, 11);
        assert_eq!(paced.window(), window + MTU);
        paced.on_congestion_event(began + Duration::from_millis(50), began, false, MTU);
        let in_flight = window - MTU;
        assert!(paced.congestion_window() < in_flight);
        assert!(in_flight + MTU < paced.window() && in_flight + 2 * MTU >= paced.window());
        paced.on_sent(began + Duration::from_millis(50), MTU, 12);
        assert_eq!(paced.window(), paced.congestion_window() + MTU);
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
        let now = Instant::now();
        let mut paced = paced(now);
        paced.on_sent(now, ONLY_ACKS, 0);
        assert_eq!(paced.usage.in_flight, 0);
        paced.on_sent(now, ONLY_ACKS + 1, 1);
        assert_eq!(paced.usage.in_flight, ONLY_ACKS + 1);
    }

    #[test]
    fn a_window_that_fills_the_path_grows_by_a_datagram_in_a_round_trip() {
        let mut rate = AckRate { shortest_rtt: Duration::from_millis(50), ..AckRate::default() };
        assert!(!rate.is_exceeded_by(u64::MAX));
        rate.rate = 1e6;
        assert!(!rate.is_exceeded_by(75_000) && rate.is_exceeded_by(75_001));
        let mut growth = SlowGrowth::default();
        // A window in packets of one datagram.
        let grown: u64 = (0..100).map(|_| growth.acknowledged(MTU, 100 * MTU, MTU)).sum();
        assert!(grown.abs_diff(MTU) <= 1, "{grown}");
    }

    #[test]
    fn the_clock_stops_while_nothing_is_sent_and_never_goes_back() {
        let began = Instant::now();
        let at = |millis| began + Duration::from_millis(millis);
        let mut clock = SendingClock::new(began);
        clock.sent(at(0), true);
        clock.sent(at(10), false);
        assert_eq!(clock.at(at(60)), at(60));
        clock.rest(at(60));
        clock.rest(at(500));
        assert_eq!(clock.at(at(700)), at(60));
        // What is sent after a pause follows the last acknowledgement.
        clock.sent(at(1010), true);
        assert_eq!(clock.at(at(1010)), at(60));
        assert_eq!(clock.at(at(1050)), at(100));
        // Neither before anything has been sent.
        let mut clock = SendingClock::new(began);
        clock.sent(at(500), true);
        assert_eq!(clock.at(at(510)), at(10));
    }

    #[test]
    fn packets_are_before_a_loss_or_after_it_whatever_the_clock_shows() {
        let began = Instant::now();
        let at = |millis| began + Duration::from_millis(millis);
        let mut clock = SendingClock::new(began);
        let before_losses = clock.at(at(5));
        assert!(clock.packet(at(5), at(1)) > before_losses);
        clock.lost(at(50), at(2));
        let answered = clock.at(at(50));
        // One more of those that were on their way.
        clock.lost(at(55), at(40));
        assert_eq!(clock.lost, Some((at(50), answered)));
        clock.sent(at(51), false);
        clock.sent(at(9000), true);
        assert!(clock.packet(at(9050), at(50)) <= answered && clock.packet(at(9050), at(51)) > answered);
        clock.lost(at(9060), at(9000));
        assert_eq!(clock.lost.unwrap().0, at(9060));
    }

    /// Acknowledges `count` times two packets, one `spacing` after the other.
    fn acknowledge(rate: &mut AckRate, from: Instant, count: u32, spacing: Duration) -> Instant {
        rate.rtt = Duration::from_millis(50);
        let ends = (1..=count).map(|number| from + spacing * number);
        ends.inspect(|now| rate.acknowledged(*now, *now - rate.rtt, 2 * MTU, MTU)).last().unwrap()
    }

    #[test]
    fn the_rate_is_that_of_acknowledgements_that_follow_each_other() {
        let mut rate = AckRate::default();
        let spacing = Duration::from_micros(160);
        let end = acknowledge(&mut rate, Instant::now(), 30, spacing);
        let expected = 2.0 * MTU as f64 / spacing.as_secs_f64();
        assert!((rate.rate / expected - 1.0).abs() < 0.2, "{}", rate.rate);
        assert_eq!(rate.window_for(2.0 * QUINNS_GAIN), (2.0 * rate.rate * 0.05) as u64);
        // Pauses between messages say nothing, and slower ones count a little.
        let before = rate.rate;
        let end = acknowledge(&mut rate, end + Duration::from_secs(1), 3, Duration::from_millis(20));
        assert_eq!(rate.rate, before);
        acknowledge(&mut rate, end, 6, 10 * spacing);
        assert_eq!(rate.rate, before * KEPT);
    }

    #[test]
    fn what_is_acknowledged_at_once_does_not_count_for_more_than_was_sent_in_its_time() {
        let began = Instant::now();
        let mut rate = AckRate { rtt: Duration::from_millis(50), ..AckRate::default() };
        for number in 1..=100 {
            // Sent over 16 ms, acknowledged within 2 ms.
            let (sent, now) = (began + Duration::from_micros(160) * number, Duration::from_micros(20) * number);
            rate.acknowledged(began + Duration::from_millis(60) + now, sent, 2 * MTU, MTU);
        }
        let expected = 2.0 * MTU as f64 / 160e-6;
        assert!((rate.rate / expected - 1.0).abs() < 0.3, "{}", rate.rate);
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
