//! What settings do on this machine: two ranks, as threads, exchange messages over loopback.
//!
//! `cargo run --release -p comm-quic --example loopback -- [rounds=5] [phase=0.5] [only=PART] [idle=0] [SETTING …]`
//!
//! A setting is a list like `mtu=1452,congestion=cubic,waiting=busy`; `default` is none of these. Known are `bind`, `congestion`,
//! `mtu`, `receive_window`, `send_window`, `stream_window` and `waiting`; with the feature `unprotected` also
//! `protection=none`. The settings take turns, `rounds` times, so that what else the machine does falls on all of them. `phase`
//! is about how many seconds each measurement lasts, `only` one of `one-way`, `both-ways`, `trip`, `reduce`. With `idle`, it is measured instead how much of a core is used within so
//! many seconds by ranks that are connected, and by ranks that wait in a receive.
//!
//! Printed are medians over the rounds, with the smallest and the largest value. Use a machine that does nothing else.

use std::error::Error;
use std::fs;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use comm_core::conformance::Barrier;
use comm_core::local::{LocalControl, group};
use comm_core::{
    Algorithm, Communicator, CommunicatorExt, DType, Deadline, Header, Incoming, Mesh, MeshOptions, OpKind, Outgoing,
    ReduceOp, Result, Sink, Transport,
};
use comm_quic::{QuicOptions, QuicTransport};

type Failure = Box<dyn Error + Send + Sync>;

const MIB: usize = 1 << 20;

fn main() -> Result<(), Failure> {
    let mut rounds = 5;
    let mut plan = Plan { phase: Duration::from_millis(500), only: None, idle: Duration::ZERO };
    let mut settings = Vec::new();
    for argument in std::env::args().skip(1) {
        match argument.split_once('=') {
            Some(("rounds", number)) => rounds = number.parse()?,
            Some(("phase", seconds)) => plan.phase = Duration::try_from_secs_f64(seconds.parse()?)?,
            Some(("only", part)) => plan.only = Some(part.to_string()),
            Some(("idle", seconds)) => plan.idle = Duration::try_from_secs_f64(seconds.parse()?)?,
            _ => settings.push(Setting::parse(&argument)?),
        }
    }
    if settings.is_empty() {
        settings.push(Setting::parse("default")?);
    }
    let mut rows: Vec<Vec<Row>> = settings.iter().map(|_| Vec::new()).collect();
    for _ in 0..rounds {
        for (setting, rows) in settings.iter().zip(&mut rows) {
            let barrier = Barrier::new(2);
            let row = thread::scope(|scope| {
                let ranks: Vec<_> = group(2, 1)
                    .into_iter()
                    .map(|rank| {
                        let (plan, barrier) = (&plan, &barrier);
                        let name = format!("rank-{}", rank.transport.rank());
                        thread::Builder::new().name(name).spawn_scoped(scope, move || {
                            Rank::connect(&rank.control, setting, barrier)?.measure(rank.control, plan)
                        })
                    })
                    .collect::<Result<_, _>>()?;
                let mut rows = ranks.into_iter().map(|rank| rank.join().map_err(|_| "a rank panicked")?);
                let row = rows.next().ok_or("no ranks")??;
                rows.try_for_each(|row| row.map(|_| ()))?;
                Ok::<Row, Failure>(row)
            })?;
            rows.push(row);
        }
    }
    for (setting, rows) in settings.iter().zip(&rows) {
        println!("{}", setting.name);
        for (index, (name, _)) in rows.first().into_iter().flatten().enumerate() {
            let mut values: Vec<f64> = rows.iter().filter_map(|row| row.get(index)).map(|(_, value)| *value).collect();
            values.sort_unstable_by(f64::total_cmp);
            if let (Some(least), Some(median), Some(most)) =
                (values.first(), values.get(values.len() / 2), values.last())
            {
                println!("  {name:<34} {median:10.3}   [{least:.3} .. {most:.3}]");
            }
        }
    }
    Ok(())
}

/// What to measure.
struct Plan {
    phase: Duration,
    only: Option<String>,
    idle: Duration,
}

impl Plan {
    fn has(&self, part: &str) -> bool {
        self.only.as_deref().is_none_or(|only| only == part)
    }
}

/// What was measured, by name.
type Row = Vec<(String, f64)>;

struct Setting {
    name: String,
    options: QuicOptions,
    is_protected: bool,
}

impl Setting {
    fn parse(text: &str) -> Result<Self, Failure> {
        let mut options = QuicOptions::default();
        let mut is_protected = true;
        for part in text.split(',').filter(|part| *part != "default") {
            let (key, value) = part.split_once('=').ok_or_else(|| format!("'{part}' is not a setting"))?;
            match key {
                "bind" => options.bind = Some(value.parse()?),
                "congestion" => options.congestion = value.parse()?,
                "mtu" => options.mtu = Some(value.parse()?),
                "receive_window" => options.receive_window = value.parse()?,
                "send_window" => options.send_window = value.parse()?,
                "stream_window" => options.stream_window = value.parse()?,
                "waiting" => options.waiting = value.parse()?,
                "protection" if value == "none" && cfg!(feature = "unprotected") => is_protected = false,
                _ => return Err(format!("'{part}' is not a setting of this build").into()),
            }
        }
        Ok(Setting { name: text.to_string(), options, is_protected })
    }

    fn connect(&self, control: &LocalControl, deadline: Deadline) -> Result<QuicTransport> {
        #[cfg(feature = "unprotected")]
        if !self.is_protected {
            return comm_quic::UnprotectedQuic::connect(control, &self.options, deadline);
        }
        assert!(self.is_protected);
        QuicTransport::connect(control, &self.options, deadline)
    }
}

/// One of the two.
struct Rank<'a> {
    transport: Arc<QuicTransport>,
    barrier: &'a Barrier,
}

impl<'a> Rank<'a> {
    fn connect(control: &LocalControl, setting: &Setting, barrier: &'a Barrier) -> Result<Self, Failure> {
        let transport = Arc::new(setting.connect(control, soon())?);
        Ok(Rank { transport, barrier })
    }

    fn measure(&self, control: Arc<LocalControl>, plan: &Plan) -> Result<Row, Failure> {
        let mut row = Row::new();
        if !plan.idle.is_zero() {
            self.measure_idle(plan.idle, &mut row)?;
            self.transport.close(soon())?;
            return Ok(row);
        }
        self.measure_rates(plan, &mut row)?;
        if plan.has("trip") {
            self.measure_trips(plan.phase / 2, &mut row)?;
        }
        let paths = self.transport.paths();
        let mesh = Mesh::new(Arc::clone(&self.transport), control, MeshOptions::default())?;
        if plan.has("reduce") {
            self.measure_reductions(plan.phase / 2, &mesh, &mut row)?;
        }
        row.push(("packets sent".into(), paths.iter().map(|path| path.sent_packets as f64).sum()));
        row.push(("packets lost".into(), paths.iter().map(|path| path.lost_packets as f64).sum()));
        mesh.finish(Duration::from_secs(30))?;
        Ok(row)
    }

    fn measure_idle(&self, idle: Duration, row: &mut Row) -> Result<(), Failure> {
        let asleep = self.cores(|| {
            thread::sleep(idle);
            Ok(())
        });
        row.push(("connected, % of a core a rank".into(), asleep? * 50.0));
        let receiving = self.cores(|| {
            if self.transport.rank() == 0 {
                thread::sleep(idle);
                return self.exchange(Some(&[0; 8]), false);
            }
            self.exchange(None, true)
        });
        row.push(("one of them in a receive, % of a core".into(), receiving? * 100.0));
        Ok(())
    }

    fn measure_rates(&self, plan: &Plan, row: &mut Row) -> Result<(), Failure> {
        let payload = vec![1; MIB];
        let rate = |messages: usize, seconds: f64| (messages * MIB) as f64 / seconds / 1e9;
        if plan.has("one-way") {
            let one_way = |messages: usize| {
                for _ in 0..messages {
                    match self.transport.rank() {
                        0 => self.exchange(Some(&payload), false)?,
                        _ => self.exchange(None, true)?,
                    }
                }
                // The last message has arrived when the answer has.
                match self.transport.rank() {
                    0 => self.exchange(None, true),
                    _ => self.exchange(Some(&[0; 8]), false),
                }
            };
            let (messages, seconds, cpu) = self.repeat(plan.phase, one_way)?;
            row.push(("one way, GB/s".into(), rate(messages, seconds)));
            row.push(("one way, CPU s per GB".into(), cpu / seconds / rate(messages, seconds)));
        }
        if plan.has("both-ways") {
            let both_ways = |messages: usize| (0..messages).try_for_each(|_| self.exchange(Some(&payload), true));
            let (messages, seconds, _) = self.repeat(plan.phase, both_ways)?;
            row.push(("both ways, GB/s each".into(), rate(messages, seconds)));
        }
        Ok(())
    }

    fn measure_trips(&self, phase: Duration, row: &mut Row) -> Result<(), Failure> {
        let mut times = Vec::new();
        let round_trips = |count: usize| {
            times.clear();
            for _ in 0..count {
                let began = Instant::now();
                if self.transport.rank() == 0 {
                    self.exchange(Some(&[0; 8]), false)?;
                    self.exchange(None, true)?;
                } else {
                    self.exchange(None, true)?;
                    self.exchange(Some(&[0; 8]), false)?;
                }
                times.push(began.elapsed().as_secs_f64() * 1e6);
            }
            Ok(())
        };
        let (trips, seconds, cpu) = self.repeat(phase, round_trips)?;
        times.sort_unstable_by(f64::total_cmp);
        row.push(("round trip of 8 B, us".into(), times.get(times.len() / 2).copied().unwrap_or_default()));
        row.push((
            "  the slowest in a hundred, us".into(),
            times.get(times.len() * 99 / 100).copied().unwrap_or_default(),
        ));
        row.push(("  mean, us".into(), seconds / trips as f64 * 1e6));
        row.push(("  CPU us of both".into(), cpu / trips as f64 * 1e6));
        Ok(())
    }

    fn measure_reductions(
        &self,
        phase: Duration,
        mesh: &Mesh<Arc<QuicTransport>>,
        row: &mut Row,
    ) -> Result<(), Failure> {
        for (name, len) in [("4 B", 1), ("64 KiB", 16 << 10), ("1 MiB", 256 << 10)] {
            let mut values = vec![1.0f32; len];
            let mut times = Vec::new();
            let reduce = |count: usize| {
                times.clear();
                for _ in 0..count {
                    let began = Instant::now();
                    mesh.all_reduce(&mut values, ReduceOp::Max)?;
                    times.push(began.elapsed().as_secs_f64() * 1e6);
                }
                Ok(())
            };
            self.repeat(phase, reduce)?;
            times.sort_unstable_by(f64::total_cmp);
            row.push((format!("all-reduce of {name}, us"), times.get(times.len() / 2).copied().unwrap_or_default()));
        }
        Ok(())
    }

    /// Runs `body` so many times that it lasts about `phase`: how many times that was, the seconds and the CPU seconds of both.
    fn repeat(&self, phase: Duration, mut body: impl FnMut(usize) -> Result<()>) -> Result<(usize, f64, f64), Failure> {
        let mut count = 16;
        loop {
            self.barrier.wait();
            let (began, cpu) = (Instant::now(), cpu_seconds()?);
            body(count)?;
            let took = began.elapsed();
            let cpu = cpu_seconds()? - cpu;
            // Rank 0 says whether that was long enough.
            let is_enough = if self.transport.rank() == 0 {
                self.exchange(Some(&[u8::from(took * 2 >= phase)]), false)?;
                took * 2 >= phase
            } else {
                let mut answer = Keep(Vec::new());
                self.transport.exchange(0, &[], &mut [Incoming { peer: 0, sink: &mut answer }], soon())?;
                answer.0 == [1]
            };
            if is_enough {
                return Ok((count, took.as_secs_f64(), cpu));
            }
            count *= 2;
        }
    }

    /// Cores that both ranks together use during `body`.
    fn cores(&self, body: impl FnOnce() -> Result<()>) -> Result<f64, Failure> {
        self.barrier.wait();
        let (began, cpu) = (Instant::now(), cpu_seconds()?);
        body()?;
        self.barrier.wait();
        Ok((cpu_seconds()? - cpu) / began.elapsed().as_secs_f64())
    }

    fn exchange(&self, payload: Option<&[u8]>, receive: bool) -> Result<()> {
        let peer = 1 - self.transport.rank();
        let message = payload.map(|payload| Outgoing { peer, header: header(payload.len()), payload });
        let mut sink = Discard;
        let mut incoming = [Incoming { peer, sink: &mut sink }];
        let incoming = if receive { &mut incoming[..] } else { &mut [] };
        self.transport.exchange(0, message.as_slice(), incoming, soon())
    }
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(120))
}

/// CPU time that this process has used, in steps of 10 ms.
fn cpu_seconds() -> Result<f64, Failure> {
    let stat = fs::read_to_string("/proc/self/stat")?;
    // After the name in brackets: user and system time are the 12th and 13th field, in hundredths of a second.
    let (_, fields) = stat.rsplit_once(')').ok_or("no name in /proc/self/stat")?;
    let fields = fields.split_whitespace().skip(11).take(2);
    let ticks = fields.map(str::parse::<u64>).sum::<Result<u64, _>>()?;
    Ok(ticks as f64 / 100.0)
}

fn header(len: usize) -> Header {
    Header {
        communicator: 1,
        sequence: 1,
        kind: OpKind::Send,
        dtype: DType::U8,
        reduce: None,
        algorithm: Algorithm::Direct,
        root: 0,
        count: len as u64,
        step: 0,
        division: 0,
        payload_len: len as u64,
    }
}

struct Discard;

impl Sink for Discard {
    fn begin(&mut self, _header: &Header) -> Result<()> {
        Ok(())
    }

    fn piece(&mut self, bytes: &[u8]) -> Result<()> {
        std::hint::black_box(bytes);
        Ok(())
    }
}

struct Keep(Vec<u8>);

impl Sink for Keep {
    fn begin(&mut self, _header: &Header) -> Result<()> {
        Ok(())
    }

    fn piece(&mut self, bytes: &[u8]) -> Result<()> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }
}
