//! Runs one measurement over a network, and says what came of it.

use std::time::Duration;

use comm_core::launch::Captured;
use rig::link::Pipe;
use rig::link::{Carrier, TestNetwork};
use rig::machine::Watch;
use rig::outcome::{self, RunError};
use rig::rank;
use serde::Deserialize;

use super::expected::{self, LinkPath, Measure};
use super::flow::Flow;
use super::judge::{self, Range, spread};
use super::rank::{MeasureTask, Task};
use super::report::{Row, Unit, Verdict};
use super::udp::{HEADERS, LEAST, ReceiveStats, SendStats, Sender, Times};

/// A network to be measured.
pub(super) struct Bench<'a> {
    pub(super) network: &'a TestNetwork,
    /// How long each measurement takes.
    pub(super) seconds: Duration,
}

/// By how much more than the link can take is sent, so that a queue always waits for it.
const PRESSURE: f64 = 1.25;

/// Pressure that is at least enough.
const ENOUGH: f64 = 1.03;

/// Pace of datagrams whose loss is counted: as many as the link takes without a queue, but no more than this.
const COUNTED_PER_S: f64 = 20_000.0;

/// Pace of datagrams on an idle link.
const IDLE_PER_S: f64 = 100.0;

/// Processes that have no core for so long are rare.
const SHORTEST_QUIET: Duration = Duration::from_millis(150);

/// What a veth and loopback count of an Ethernet frame that is not of its IP packet.
const FRAME_HEADER: u64 = 14;

impl Bench<'_> {
    /// # Errors
    /// What went wrong, or that the user interrupted it.
    pub(super) fn rows(&self, measure: &Measure) -> Result<Vec<Row>, RunError> {
        match measure {
            Measure::Rate { from, to } => self.rate(from, *to),
            Measure::Delay { from, to } => self.delay(*from, *to),
            Measure::RoundTrip { from, to } => self.round_trip(*from, *to),
            Measure::Harm { from, to } => self.harm(*from, *to),
            Measure::Tcp { from, to } => self.flow("tcp", MeasureTask::Tcp { from: *from, to: *to }, *from, *to),
            Measure::Quic { from, to } => self.flow("quic", MeasureTask::Quic { from: *from, to: *to }, *from, *to),
        }
    }

    fn rate(&self, from: &[usize], to: usize) -> Result<Vec<Row>, RunError> {
        let profile = self.network.profile();
        let Some(asked) = expected::rate(profile, from, to) else { return Ok(Vec::new()) };
        let bits = 8.0 * f64::from(profile.mtu);
        let pressure = |rank: usize| {
            let up = profile.pipes(rank).up.rate_bits_per_s.map_or(asked, |bits| bits as f64);
            Sender { rank, packets_per_s: PRESSURE * up / bits }
        };
        let senders: Vec<Sender> = from.iter().map(|rank| pressure(*rank)).collect();
        let payload = profile.mtu as usize - HEADERS;
        let work = MeasureTask::Datagrams { senders: senders.clone(), to, payload };
        let (heard, sent, note) = self.datagrams(work, &senders, to)?;
        let mut row = Row {
            way: if let [one] = from { way(*one, to) } else { format!("all > {to}") },
            ..self.row("rate", Unit::Mbit)
        };
        row.asked = Some(asked / 1e6);
        row.measured = heard.bits_per_s.unwrap_or(f64::NAN) / 1e6;
        row.range = row.asked.map(Range::of_rate);
        row.verdict = Verdict::of(row.measured, row.range);
        row.note = note;
        // What the kernel would not take waited for the link; without that, the senders must have sent enough.
        let offered: f64 = sent.iter().map(|sent| sent.packets as f64 * bits / sent.seconds.max(1e-3)).sum();
        let is_filled = sent.iter().any(|sent| sent.held_back > sent.packets / 100) || offered >= ENOUGH * asked;
        if row.is_out() && !is_filled && row.measured < asked / 1e6 {
            row.verdict = Verdict::NotFilled;
            row.note = told([format!("this machine cannot send more than {:.0} Mbit/s here", offered / 1e6), row.note]);
        }
        Ok(vec![row])
    }

    fn delay(&self, from: usize, to: usize) -> Result<Vec<Row>, RunError> {
        let profile = self.network.profile();
        let asked = LinkPath::new(profile, from, to);
        let jitter = asked.jitter().as_secs_f64();
        let packets_per_s = idle_pace(jitter);
        let senders = vec![Sender { rank: from, packets_per_s }];
        let work = MeasureTask::Datagrams { senders: senders.clone(), to, payload: LEAST };
        let (heard, _, note) = self.datagrams(work, &senders, to)?;
        let is_link = profile.carrier != Carrier::None;
        let ms = asked.delay(LEAST + HEADERS).as_secs_f64() * 1e3;
        let mut row = Row { way: way(from, to), note: note.clone(), ..self.row("delay", Unit::Ms) };
        row.asked = is_link.then_some(ms);
        let Some(delays) = heard.delays else { return Err(nothing(&row)) };
        row.measured = if jitter > 0.0 { judge::middle(&delays) } else { delays.median } / 1e3;
        row.range = row.asked.map(Range::of_delay);
        row.verdict = Verdict::of(row.measured, row.range);
        let mut rows = vec![row];
        if jitter > 0.0 {
            let mut row = Row { way: way(from, to), ..self.row("jitter", Unit::Ms) };
            row.asked = Some(jitter * 1e3);
            row.measured = judge::jitter(&delays) / 1e3;
            let seen = format!("{} packets, longest delay {:.1} ms", delays.count, delays.longest / 1e3);
            row.note = told([seen, note]);
            row.range = Some(Range::of_jitter(jitter * 1e3, delays.count));
            row.verdict = Verdict::of(row.measured, row.range);
            rows.push(row);
        }
        Ok(rows)
    }

    fn round_trip(&self, from: usize, to: usize) -> Result<Vec<Row>, RunError> {
        let profile = self.network.profile();
        let both = [LinkPath::new(profile, from, to), LinkPath::new(profile, to, from)];
        let ms: f64 = both.iter().map(|path| path.delay(LEAST + HEADERS).as_secs_f64() * 1e3).sum();
        let jitter: f64 = both.iter().map(|path| path.jitter().as_secs_f64()).sum();
        let work = MeasureTask::RoundTrip { from, to, packets_per_s: idle_pace(jitter) };
        let (captured, doubts) = self.run(work)?;
        let times: Option<Times> = said(&captured, from)?;
        let mut row = Row { way: format!("{from} > {to} > {from}"), ..self.row("round trip", Unit::Ms) };
        row.asked = (profile.carrier != Carrier::None).then_some(ms);
        let Some(times) = times else { return Err(nothing(&row)) };
        row.measured = times.median / 1e3;
        row.range = row.asked.map(|ms| Range::of_round_trip(ms, jitter * 1e3, times.count));
        row.note = doubts.join(", ");
        row.verdict = Verdict::of(row.measured, row.range);
        Ok(vec![row])
    }

    /// Loss, and what else an emulator does to packets, while nothing overflows.
    fn harm(&self, from: usize, to: usize) -> Result<Vec<Row>, RunError> {
        let profile = self.network.profile();
        let asked = LinkPath::new(profile, from, to);
        let bits = 8.0 * (LEAST + HEADERS) as f64;
        let packets_per_s = asked.rate().map_or(COUNTED_PER_S, |rate| COUNTED_PER_S.min(0.4 * rate as f64 / bits));
        let senders = vec![Sender { rank: from, packets_per_s }];
        let work = MeasureTask::Datagrams { senders: senders.clone(), to, payload: LEAST };
        let (heard, sent, note) = self.datagrams(work, &senders, to)?;
        let pipes = self.network.pipes()?;
        let pipe = |end, direction: &str| pipes.iter().find(|pipe| pipe.end == end && pipe.direction == direction);
        let (Some(up), Some(down)) = (pipe(from, "up"), pipe(to, "down")) else { return Ok(Vec::new()) };
        let mut rows = Vec::new();
        // Each pipe that is asked to lose something, and the way up in any case.
        for (counted, spec, name) in [(up, asked.up, "up"), (down, asked.down, "down")] {
            let end = format!("{} {name}", counted.end);
            let passed = counted.packets - counted.overflowed;
            let mut share = |what: &str, asked: f64, count: u64, spread: f64, always: bool| {
                if asked <= 0.0 && !always {
                    return;
                }
                let mut row = Row { way: end.clone(), by: "emulator".into(), ..self.row(what, Unit::Percent) };
                row.range = Some(percent(Range::of_share(asked, passed, spread)));
                row.asked = Some(asked * 100.0);
                row.measured = 100.0 * count as f64 / passed as f64;
                row.verdict = Verdict::of(row.measured, row.range);
                row.note = format!("{count} of {passed} packets");
                if spread != 1.0 {
                    row.note += &format!("; losses in bursts vary {spread:.1} times as much");
                }
                rows.push(row);
            };
            let is_up = name == "up";
            share("loss", spec.loss.average(), counted.lost, spread(&spec.loss), is_up);
            share("held back", spec.reorder_probability, counted.reordered, 1.0, false);
            share("twice", spec.duplicate_probability, counted.duplicated, 1.0, false);
        }
        // What arrived, by those who sent and received: nobody's counters but their own.
        let sent: u64 = sent.iter().map(|sent| sent.packets).sum();
        let missing = sent.saturating_sub(heard.packets + heard.unread);
        let kept = (1.0 - asked.up.loss.average()) * (1.0 - asked.down.loss.average());
        let widest = [&asked.up.loss, &asked.down.loss].map(spread).into_iter().fold(1.0, f64::max);
        let mut row = Row { way: way(from, to), note, ..self.row("loss", Unit::Percent) };
        row.asked = Some(100.0 * (1.0 - kept));
        row.range = Some(percent(Range::of_share(1.0 - kept, sent, widest)));
        row.measured = 100.0 * missing as f64 / sent as f64;
        row.verdict = Verdict::of(row.measured, row.range);
        let more = [(missing, "missing"), (heard.overtaken, "overtaken"), (heard.twice, "twice")];
        let more = more.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}"));
        row.note = told([format!("{sent} sent")].into_iter().chain(more).chain([row.note]));
        rows.push(row);
        Ok(rows)
    }

    fn flow(&self, protocol: &str, work: MeasureTask, from: usize, to: usize) -> Result<Vec<Row>, RunError> {
        let profile = self.network.profile();
        let asked = LinkPath::new(profile, from, to).rate();
        let mut row = Row { way: way(from, to), by: protocol.into(), ..self.row("flow", Unit::Mbit) };
        row.asked = asked.map(|bits| bits as f64 / 1e6);
        row.range = row.asked.map(Range::up_to_rate);
        let (captured, doubts) = self.run(work)?;
        let (sender, receiver): (Flow, Flow) = (said(&captured, from)?, said(&captured, to)?);
        // Others use loopback too.
        let is_shared = profile.carrier == Carrier::None;
        let measured = if is_shared { receiver.payload_bits_per_s } else { receiver.bits_per_s };
        row.measured = measured.unwrap_or(f64::NAN) / 1e6;
        row.verdict = Verdict::of(row.measured, row.range);
        let payload = receiver.payload_bits_per_s.map(|bits| format!("payload {:.1}", bits / 1e6));
        let mut notes: Vec<String> = payload.into_iter().collect();
        notes.extend(row.asked.map(|asked| format!("{:.0} % of the link", 100.0 * row.measured / asked)));
        notes.extend(sender.sent_again.map(|packets| format!("{packets} packets sent again")));
        let pipes = self.network.pipes()?;
        let on_the_way =
            |pipe: &&Pipe| (pipe.end == from && pipe.direction == "up") || (pipe.end == to && pipe.direction == "down");
        let sum = |of: fn(&Pipe) -> u64| pipes.iter().filter(on_the_way).map(of).sum::<u64>();
        let (lost, overflowed) = (sum(|pipe| pipe.lost), sum(|pipe| pipe.overflowed));
        if !pipes.is_empty() {
            notes.push(format!("{lost} lost, {overflowed} dropped by a full queue"));
        }
        notes.extend(doubts);
        row.note = notes.join(", ");
        Ok(vec![row])
    }

    /// What was heard and sent, and what is doubtful about it.
    fn datagrams(
        &self,
        work: MeasureTask,
        senders: &[Sender],
        to: usize,
    ) -> Result<(ReceiveStats, Vec<SendStats>, String), RunError> {
        let (captured, doubts) = self.run(work)?;
        let heard: ReceiveStats = said(&captured, to)?;
        let sent = senders.iter().map(|sender| said(&captured, sender.rank)).collect::<Result<_, _>>()?;
        Ok((heard, sent, doubts.join(", ")))
    }

    /// What the processes said, and why it may be doubtful.
    fn run(&self, work: MeasureTask) -> Result<(Vec<Captured>, Vec<String>), RunError> {
        let folder = tempfile::tempdir().map_err(|error| format!("no temporary folder: {error}"))?;
        let task = Task {
            work,
            ends: self.network.addresses(),
            interface: self.network.interface().into(),
            header: if self.network.profile().carrier == Carrier::Emulated { 0 } else { FRAME_HEADER },
            length: self.seconds,
            quiet: self.quiet(),
            folder: folder.path().to_owned(),
        };
        let arguments = rank::arguments(&task, folder.path())?;
        let launch = self.network.launch(&rank::this_program()?, arguments, task.ranks(), task.timeout())?;
        // What plays the link is part of the measurement.
        let watch = Watch::start(self.network.process().into_iter().collect());
        self.network.reset_counters()?;
        let captured = outcome::run(&launch)?;
        let disturbed = watch.finish().into_iter().map(|flag| flag.what);
        Ok((captured, self.network.bottleneck()?.into_iter().chain(disturbed).collect()))
    }

    /// Longer than a packet that follows another one can be on its way.
    fn quiet(&self) -> Duration {
        let profile = self.network.profile();
        let pipes = profile.unusual.values().chain([&profile.usual]);
        let longest = pipes.flat_map(|pipes| [&pipes.up, &pipes.down]).map(|pipe| pipe.delay + pipe.jitter).max();
        SHORTEST_QUIET + 2 * longest.unwrap_or_default()
    }

    fn row(&self, what: &str, unit: Unit) -> Row {
        Row {
            profile: self.network.profile().name.clone(),
            what: what.into(),
            way: String::new(),
            by: "udp".into(),
            unit,
            asked: None,
            measured: f64::NAN,
            range: None,
            verdict: Verdict::Told,
            note: String::new(),
        }
    }
}

fn way(from: usize, to: usize) -> String {
    format!("{from} > {to}")
}

fn percent(share: Range) -> Range {
    Range { least: 100.0 * share.least, most: 100.0 * share.most }
}

/// So rarely that jitter does not make one packet wait for another.
fn idle_pace(jitter: f64) -> f64 {
    if jitter > 0.0 { IDLE_PER_S.min(1.0 / (4.0 * jitter)) } else { IDLE_PER_S }
}

/// What there is to say, in one line.
fn told(parts: impl IntoIterator<Item = String>) -> String {
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(", ")
}

fn nothing(row: &Row) -> RunError {
    RunError::Failed(format!("{} of {}, {}: no packet arrived", row.what, row.profile, row.way))
}

/// What a rank has measured.
fn said<T: for<'a> Deserialize<'a>>(captured: &[Captured], rank: usize) -> Result<T, RunError> {
    let text = captured.get(rank).map_or("", |rank| rank.stdout.trim());
    serde_json::from_str(text).map_err(|error| format!("rank {rank} of a measurement printed {text:?}: {error}").into())
}
