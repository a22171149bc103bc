//! What TCP's and QUIC's congestion control makes of a path: how fast it begins, and what losses leave of it.

/// Packets that a connection sends at first, and again after it has been idle (RFC 6928).
pub const INITIAL_WINDOW: f64 = 10.0;

/// Least time after which what is lost at the end of a burst is sent again, in seconds: Linux's minimum.
pub const RETRANSMISSION_S: f64 = 0.2;

/// Round-trip times below which a window is of no matter: it grows to any rate within a fraction of a millisecond.
pub const SHORTEST_ROUND_TRIP_S: f64 = 1e-3;

/// Share of packets up to which random losses hardly hold BBR back (Cardwell et al., "BBR: Congestion-Based Congestion Control", 2016, figure 8).
pub const MOST_LOSS_OF_BBR: f64 = 0.15;

/// Round trips at its rate that several connections of BBR keep in the queue of a path that they share; a queue that holds less loses packets
/// all the time (Hock, Bless and Zitterbart, "Experimental evaluation of BBR congestion control", 2017: 1 to 1.5).
pub const QUEUE_OF_BBR: f64 = 1.5;

/// Bytes a second that `loss`, the share of packets that is lost at random, leaves a flow whose packets carry `segment` bytes over a path with a
/// round trip of `rtt` seconds; infinite without loss. The greater of two:
///
/// - Reno, by Padhye et al., "Modeling TCP Reno performance" (2000), equation 30, with an acknowledgement for every second packet;
///   without time-outs it is Mathis' formula, √(3/(2·2p)) segments in a round trip;
/// - CUBIC, by RFC 9438, 5.1: 1.054·rtt^0.75 / p^0.75 segments in a round trip.
pub fn rate_under_loss(loss: f64, segment: f64, rtt: f64) -> f64 {
    if loss <= 0.0 {
        return f64::INFINITY;
    }
    if loss >= 1.0 {
        return 0.0;
    }
    let rtt = rtt.max(1e-5);
    let acknowledged = 2.0;
    let time_out = RETRANSMISSION_S.max(rtt);
    let by_acknowledgements = rtt * (2.0 * acknowledged * loss / 3.0).sqrt();
    let in_time_outs = (3.0 * (3.0 * acknowledged * loss / 8.0).sqrt()).min(1.0);
    let by_time_outs = time_out * in_time_outs * loss * (1.0 + 32.0 * loss * loss);
    let reno = segment / (by_acknowledgements + by_time_outs);
    let cubic = segment * 1.054 * rtt.powf(0.75) / loss.powf(0.75) / rtt;
    reno.max(cubic)
}

/// What a queue that overflows does to a flow that has more on its way than it takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Overflows {
    /// Seconds of sending from one to the next.
    pub every_s: f64,
    /// Seconds by which what is lost, and in its order all that follows, comes later.
    pub late_s: f64,
}

/// How often a flow at `rate` bytes a second overflows a queue of `queue` bytes at a path's slowest place, in packets of `segment` bytes over a round trip of `rtt`
/// seconds.
///
/// The rate stays in use, because the queue is not empty when the window shrinks; but the lost packet is sent again behind a full queue, and until it
/// is there the receiver gets nothing. From there on the window grows from 0.7 to 1 of what path and queue hold, by CUBIC or as Reno would
/// (RFC 9438: C 0.4, β 0.7, α 0.529), whichever is sooner.
pub fn overflows(rate: f64, queue: f64, segment: f64, rtt: f64) -> Overflows {
    let full = (queue + rate * rtt) / segment;
    let late_s = queue / rate + rtt;
    let as_cubic = (0.3 * full / 0.4).cbrt();
    let as_reno = 0.3 * full / 0.529 * late_s;
    Overflows { every_s: as_cubic.min(as_reno).max(late_s), late_s }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_losses_are_those_of_mathis_where_cubic_is_no_faster() {
        // On a short path CUBIC grows as Reno does: 1448 bytes, 10 ms, one in a thousand.
        let rate = rate_under_loss(1e-3, 1448.0, 0.01);
        let mathis = 1448.0 / 0.01 * (3.0f64 / 4.0 / 1e-3).sqrt();
        assert!(rate < mathis && rate > 0.8 * mathis, "{rate} of {mathis}");
        assert!(rate_under_loss(1e-3, 1448.0, 0.02) < rate);
    }

    #[test]
    fn on_long_paths_cubic_is_faster_than_reno() {
        let (rtt, loss) = (0.1, 1e-5);
        let rate = rate_under_loss(loss, 1448.0, rtt);
        let mathis = 1448.0 / rtt * (3.0f64 / 4.0 / loss).sqrt();
        assert!(rate > 1.5 * mathis, "{rate}, {mathis}");
    }

    #[test]
    fn slow_links_overflow_more_often() {
        let of = |rate: f64| overflows(rate, 0.05 * rate, 9000.0, 1e-4);
        let (slow, fast) = (of(50e6 / 8.0), of(200e6 / 8.0));
        assert!((slow.late_s - 0.0501).abs() < 1e-9 && (fast.late_s - slow.late_s).abs() < 1e-9);
        assert!((slow.every_s - 0.99).abs() < 0.02 && (fast.every_s - 3.95).abs() < 0.1, "{slow:?} {fast:?}");
    }

    #[test]
    fn time_outs_end_it_where_many_are_lost() {
        assert!(rate_under_loss(0.2, 1448.0, 0.05) < 30_000.0);
        assert_eq!((rate_under_loss(0.0, 1448.0, 0.05), rate_under_loss(1.0, 1448.0, 0.05)), (f64::INFINITY, 0.0));
    }
}
