//! What becomes of each packet in one direction of a link, in a time that is only a number: no clock, no packets, no chance but a seed.

use std::collections::VecDeque;
use std::time::Duration;

use super::random::Random;
use super::spec::{Loss, PipeSpec};

/// One direction of one end. Times are nanoseconds since any moment that is the same for all calls.
#[derive(Debug)]
pub(super) struct Pipe {
    spec: PipeSpec,
    /// When the packet that was accepted last has been sent, and the rest below a nanosecond in parts of 1/rate.
    free_at: u64,
    rest: u64,
    /// The packets that wait or are being sent: when each has been sent, and its bytes. Kept only where a queue has a limit.
    waiting: VecDeque<(u64, u64)>,
    waiting_bytes: u64,
    /// When the packet before this one arrives, unless it is held back.
    last_arrival: u64,
    random: RandomStreams,
    in_burst: bool,
    tally: Tally,
}

/// What was decided about a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The queue was full.
    Overflowed,
    /// It was sent, and got lost.
    Lost,
    Arrives {
        at: u64,
        /// A copy arrives right behind it.
        twice: bool,
    },
}

/// How often each has happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) packets: u64,
    pub(super) bytes: u64,
    pub(super) lost: u64,
    pub(super) overflowed: u64,
    pub(super) reordered: u64,
    pub(super) duplicated: u64,
}

/// One stream of random numbers for each question, so that the answers to one do not depend on whether another is asked.
#[derive(Debug)]
struct RandomStreams {
    burst: Random,
    loss: Random,
    jitter: Random,
    reorder: Random,
    duplicate: Random,
}

impl Pipe {
    /// `number` is different for each pipe of a link, so that they have random numbers of their own.
    pub(super) fn new(spec: PipeSpec, seed: u64, number: u64) -> Self {
        Pipe {
            spec,
            free_at: 0,
            rest: 0,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            last_arrival: 0,
            random: RandomStreams::new(seed, number),
            in_burst: false,
            tally: Tally::default(),
        }
    }

    /// Begins to count and to decide from the start. What is under way stays so.
    pub(super) fn reset(&mut self, seed: u64, number: u64) {
        self.random = RandomStreams::new(seed, number);
        self.in_burst = false;
        self.tally = Tally::default();
    }

    pub(super) fn tally(&self) -> Tally {
        self.tally
    }

    /// A packet of `bytes` comes at `now`, which is never before the `now` of the call before.
    pub(super) fn offer(&mut self, now: u64, bytes: u64) -> Verdict {
        self.tally.packets += 1;
        self.tally.bytes += bytes;
        if self.spec.queue_bytes.is_some_and(|most| self.backlog(now) + bytes > most) {
            self.tally.overflowed += 1;
            return Verdict::Overflowed;
        }
        let sent = self.send(now, bytes);
        if self.gets_lost() {
            self.tally.lost += 1;
            return Verdict::Lost;
        }
        // In order, even if the delay of this one is shorter.
        let in_order = self.last_arrival.max(sent.saturating_add(self.delay()));
        self.last_arrival = in_order;
        let held_back = self.random.reorder.happens(self.spec.reorder_probability);
        let twice = self.random.duplicate.happens(self.spec.duplicate_probability);
        self.tally.reordered += u64::from(held_back);
        self.tally.duplicated += u64::from(twice);
        let at = if held_back { in_order.saturating_add(nanos(self.spec.reorder_by)) } else { in_order };
        Verdict::Arrives { at, twice }
    }

    /// Bytes that wait or are being sent.
    fn backlog(&mut self, now: u64) -> u64 {
        while let Some((sent, bytes)) = self.waiting.front()
            && *sent <= now
        {
            self.waiting_bytes -= bytes;
            self.waiting.pop_front();
        }
        self.waiting_bytes
    }

    /// When the packet has been sent. Parts of a nanosecond add up, so that the rate is exact however many packets follow one another.
    fn send(&mut self, now: u64, bytes: u64) -> u64 {
        let Some(rate) = self.spec.rate_bits_per_s else { return now };
        if now > self.free_at {
            (self.free_at, self.rest) = (now, 0);
        }
        let work = u128::from(bytes) * 8 * 1_000_000_000 + u128::from(self.rest);
        let took = u64::try_from(work / u128::from(rate)).unwrap_or(u64::MAX);
        self.free_at = self.free_at.saturating_add(took);
        // Less than the rate.
        self.rest = (work % u128::from(rate)) as u64;
        if self.spec.queue_bytes.is_some() {
            self.waiting.push_back((self.free_at, bytes));
            self.waiting_bytes += bytes;
        }
        self.free_at
    }

    fn gets_lost(&mut self) -> bool {
        match self.spec.loss {
            Loss::None => false,
            Loss::Random { probability } => self.random.loss.happens(probability),
            Loss::Bursty { enter, leave, loss_in_burst } => {
                let turns = if self.in_burst { leave } else { enter };
                self.in_burst ^= self.random.burst.happens(turns);
                // Asked in any case: the k-th packet has the k-th random number.
                self.random.loss.happens(loss_in_burst) && self.in_burst
            }
        }
    }

    fn delay(&mut self) -> u64 {
        let (delay, jitter) = (nanos(self.spec.delay), nanos(self.spec.jitter));
        delay.saturating_sub(jitter) + self.random.jitter.up_to(2 * jitter)
    }
}

impl RandomStreams {
    fn new(seed: u64, number: u64) -> Self {
        let stream = |question| Random::new(seed, [number, question]);
        RandomStreams { burst: stream(0), loss: stream(1), jitter: stream(2), reorder: stream(3), duplicate: stream(4) }
    }
}

/// Times of a spec are a minute at most.
pub(super) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn pipe(spec: PipeSpec) -> Pipe {
        spec.check(1500).unwrap();
        Pipe::new(spec, 7, 0)
    }

    fn arrival(verdict: Verdict) -> u64 {
        match verdict {
            Verdict::Arrives { at, .. } => at,
            other => panic!("{other:?}"),
        }
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Everything at once.
    fn rough() -> PipeSpec {
        PipeSpec {
            rate_bits_per_s: Some(10_000_000),
            delay: ms(20),
            jitter: ms(5),
            loss: Loss::Bursty { enter: 0.02, leave: 0.3, loss_in_burst: 0.7 },
            reorder_probability: 0.05,
            reorder_by: ms(4),
            duplicate_probability: 0.03,
            queue_bytes: Some(20_000),
        }
    }

    #[test]
    fn nothing_is_changed_by_nothing() {
        let mut pipe = pipe(PipeSpec::default());
        for now in [0, 5, 5, 9] {
            assert_eq!(pipe.offer(now, 1500), Verdict::Arrives { at: now, twice: false });
        }
        assert_eq!(pipe.tally(), Tally { packets: 4, bytes: 6000, ..Tally::default() });
    }

    #[test]
    fn the_same_seed_decides_the_same() {
        let run = |pipe: &mut Pipe, start| (0..5000).map(|k| pipe.offer(start + k * MS, 1500)).collect::<Vec<_>>();
        let mut one = pipe(rough());
        let first = run(&mut one, 0);
        assert_eq!(run(&mut pipe(rough()), 0), first);
        assert_ne!(run(&mut Pipe::new(rough(), 8, 0), 0), first);
        assert_ne!(run(&mut Pipe::new(rough(), 7, 1), 0), first);
        // After a reset too, once what is under way has arrived.
        let (tally, later) = (one.tally(), 60_000 * MS);
        one.reset(7, 0);
        let shifted = first.iter().map(|verdict| match *verdict {
            Verdict::Arrives { at, twice } => Verdict::Arrives { at: at + later, twice },
            other => other,
        });
        assert!(run(&mut one, later).into_iter().eq(shifted));
        assert_eq!(one.tally(), tally);
    }

    #[test]
    fn one_random_stream_does_not_disturb_another() {
        let loss = Loss::Random { probability: 0.1 };
        let lost = |spec: PipeSpec| {
            let mut pipe = pipe(spec);
            (0..1000).map(|k| pipe.offer(k * MS, 100) == Verdict::Lost).collect::<Vec<_>>()
        };
        let with_jitter =
            PipeSpec { delay: ms(9), jitter: ms(5), duplicate_probability: 0.5, loss, ..PipeSpec::default() };
        assert_eq!(lost(PipeSpec { loss, ..PipeSpec::default() }), lost(with_jitter));
    }

    #[test]
    fn a_million_packets_keep_the_rate_to_a_nanosecond() {
        // 1500 bytes at this rate take 12,345.67… ns.
        let rate = 972_000_001;
        let mut pipe = pipe(PipeSpec { rate_bits_per_s: Some(rate), delay: ms(3), ..PipeSpec::default() });
        let packets = 1_000_000_u128;
        for k in 1..=packets {
            let exact = (k * 1500 * 8 * 1_000_000_000 / u128::from(rate)) as u64 + 3 * MS;
            assert_eq!(arrival(pipe.offer(0, 1500)), exact);
        }
    }

    #[test]
    fn a_link_at_rest_saves_nothing_up() {
        let mut pipe = pipe(PipeSpec { rate_bits_per_s: Some(8_000_000), ..PipeSpec::default() });
        assert_eq!(arrival(pipe.offer(0, 1000)), MS);
        assert_eq!(arrival(pipe.offer(0, 1000)), 2 * MS);
        assert_eq!(arrival(pipe.offer(10 * MS, 1000)), 11 * MS);
    }

    #[test]
    fn a_full_queue_drops_what_comes_last() {
        let spec = PipeSpec { rate_bits_per_s: Some(8_000_000), queue_bytes: Some(3000), ..PipeSpec::default() };
        let mut pipe = pipe(spec);
        let offers = (0..5).map(|_| pipe.offer(0, 1000)).collect::<Vec<_>>();
        let arrives = |at| Verdict::Arrives { at, twice: false };
        let dropped = Verdict::Overflowed;
        assert_eq!(offers, [arrives(MS), arrives(2 * MS), arrives(3 * MS), dropped, dropped]);
        assert_eq!(pipe.offer(MS - 1, 1000), dropped);
        assert_eq!(pipe.offer(MS, 1001), dropped, "one has left, so 1000 bytes fit and no more");
        assert_eq!(pipe.offer(MS, 1000), arrives(4 * MS));
        assert_eq!(pipe.tally().overflowed, 4);
        assert_eq!(pipe.offer(4 * MS, 3000), arrives(7 * MS), "all have left");
        // Overload: what arrives is what the rate lets pass, and nothing waits longer than a queue takes.
        let passed = (0..10_000).filter(|k| {
            let now = 7 * MS + k * MS / 2;
            let verdict = pipe.offer(now, 1000);
            if let Verdict::Arrives { at, .. } = verdict {
                assert!(at - now <= 3 * MS);
            }
            verdict != dropped
        });
        assert!((5000..5003).contains(&passed.count()));
    }

    #[test]
    fn losses_are_as_likely_as_asked() {
        let packets = 200_000;
        for probability in [0.0001, 0.01, 0.3, 0.0, 1.0] {
            let mut pipe = pipe(PipeSpec { loss: Loss::Random { probability }, ..PipeSpec::default() });
            for k in 0..packets {
                pipe.offer(k, 100);
            }
            within(pipe.tally().lost, packets as f64, probability, 1.0);
        }
    }

    #[test]
    fn bursts_are_as_long_and_as_dense_as_asked() {
        let packets = 400_000_u64;
        let loss = Loss::Bursty { enter: 0.01, leave: 0.25, loss_in_burst: 1.0 };
        let mut pipe = pipe(PipeSpec { loss, ..PipeSpec::default() });
        let lost: Vec<bool> = (0..packets).map(|k| pipe.offer(k, 100) == Verdict::Lost).collect();
        let count = pipe.tally().lost;
        // Packets of one burst stand and fall together, which widens the interval by the square root of (2 - leave)/leave.
        within(count, packets as f64, loss.average(), 7_f64.sqrt());
        let bursts = lost.windows(2).filter(|pair| pair == &[false, true]).count() as f64;
        let mean = count as f64 / bursts;
        assert!((mean - 4.0).abs() < 0.2, "bursts of {mean} packets");
        let half = Loss::Bursty { enter: 0.01, leave: 0.25, loss_in_burst: 0.5 };
        let mut pipe = Pipe::new(PipeSpec { loss: half, ..PipeSpec::default() }, 1, 1);
        for k in 0..packets {
            pipe.offer(k, 100);
        }
        within(pipe.tally().lost, packets as f64, half.average(), 7_f64.sqrt());
    }

    #[test]
    fn jitter_is_even_and_keeps_the_order() {
        let spec = PipeSpec { delay: ms(20), jitter: ms(5), ..PipeSpec::default() };
        // So far apart that none can catch up with the one before it.
        let mut apart = pipe(spec.clone());
        let delays: Vec<u64> = (0..20_000).map(|k| arrival(apart.offer(k * 11 * MS, 100)) - k * 11 * MS).collect();
        assert!(delays.iter().all(|delay| (15 * MS..=25 * MS).contains(delay)));
        for part in 0..10 {
            let range = (15 + part) * MS..(16 + part) * MS;
            within(delays.iter().filter(|delay| range.contains(delay)).count() as u64, 20_000.0, 0.1, 1.0);
        }
        let mut close = pipe(spec);
        let arrivals: Vec<u64> = (0..20_000).map(|k| arrival(close.offer(k * MS / 10, 100))).collect();
        assert!(arrivals.is_sorted());
        assert!(arrivals.iter().zip(0..).all(|(at, k)| (15 * MS..=25 * MS).contains(&(at - k * MS / 10))));
    }

    #[test]
    fn what_is_held_back_is_overtaken() {
        let spec = PipeSpec { delay: ms(5), reorder_probability: 0.1, reorder_by: ms(2), ..PipeSpec::default() };
        let mut pipe = pipe(spec);
        let delays: Vec<u64> = (0..20_000).map(|k| arrival(pipe.offer(k * MS, 100)) - k * MS).collect();
        let held = delays.iter().filter(|delay| **delay == 7 * MS).count() as u64;
        assert!(delays.iter().all(|delay| [5 * MS, 7 * MS].contains(delay)));
        assert_eq!(pipe.tally().reordered, held);
        within(held, 20_000.0, 0.1, 1.0);
    }

    #[test]
    fn copies_are_as_likely_as_asked() {
        let mut pipe = pipe(PipeSpec { duplicate_probability: 0.2, ..PipeSpec::default() });
        let twice =
            (0..20_000).filter(|k| pipe.offer(*k, 100) == Verdict::Arrives { at: *k, twice: true }).count() as u64;
        assert_eq!(pipe.tally().duplicated, twice);
        within(twice, 20_000.0, 0.2, 1.0);
    }

    /// Within four standard deviations of a binomial distribution, widened by `factor`. The seeds are fixed: this holds or not for ever.
    fn within(count: u64, of: f64, probability: f64, factor: f64) {
        let deviation = (of * probability * (1.0 - probability)).sqrt() * factor;
        let off = (count as f64 - of * probability).abs();
        assert!(off <= 4.0 * deviation, "{count} of {of} with probability {probability}: {off} off, σ is {deviation}");
    }
}
