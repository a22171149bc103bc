//! What each layer costs: raw TCP, ZeroMQ over Unix sockets, over TCP without its gate, behind its packet filter and behind its relay,
//! in each way of waiting, between two ranks that are threads of this process.
//!
//! ```text
//! cargo run --release -p comm-tcp --example ladder [-- CONGESTION_CONTROL [ROWS [SEGMENTS]]]
//! ```
//!
//! `CONGESTION_CONTROL` is a name that the kernel knows, or `-` for its default; `ROWS` a part of the names of the rows to
//! measure; `SEGMENTS` sizes of ZeroMQ's segments in bytes, separated by commas. Rows take turns, so that a busy moment of the machine hits all of them; each figure is a median with the least and
//! the greatest of the rounds. CPU time is that of the whole process, so of both ends and of the threads behind them, for one
//! GB that went from one end to the other. Figures of a debug build mean nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use comm_core::{
    Algorithm, Control, DType, Deadline, Error, Header, Incoming, OpKind, Outgoing, Result, Sink, Transport, Waiting,
};
use comm_tcp::{Gate, RawTcpTransport, TcpOptions, ZmqTransport};

const ROUNDS: usize = 9;
const MESSAGES: usize = 250;
const MESSAGE: usize = 1 << 20;
const PINGS: usize = 1000;

/// One way of sending, and what was measured of it.
struct Row {
    name: String,
    transport: Arc<dyn Transport>,
    /// GB/s.
    rates: Vec<f64>,
    /// CPU seconds for a GB.
    efforts: Vec<f64>,
    /// µs.
    trips: Vec<f64>,
}

fn main() -> Result<()> {
    let congestion = std::env::args().nth(1).filter(|name| name != "-");
    let rows = std::env::args().nth(2).unwrap_or_default();
    let segments = std::env::args().nth(3).unwrap_or(TcpOptions::default().segment.to_string());
    let segments: Vec<usize> = segments
        .split(',')
        .map(|bytes| bytes.parse().map_err(|_| Error::invalid(format!("'{bytes}' is not a segment size in bytes"))))
        .collect::<Result<_>>()?;
    if cfg!(debug_assertions) {
        println!("This is a debug build: the figures mean nothing.");
    }
    let ranks = comm_core::local::group(2, 1);
    let threads: Vec<_> = ranks
        .into_iter()
        .map(|rank| {
            let (congestion, rows, segments) = (congestion.clone(), rows.clone(), segments.clone());
            std::thread::spawn(move || measure(&*rank.control, congestion, &rows, &segments))
        })
        .collect();
    for thread in threads {
        thread.join().map_err(|_| Error::invalid("a rank panicked"))??;
    }
    Ok(())
}

fn measure(control: &dyn Control, congestion: Option<String>, wanted: &str, segments: &[usize]) -> Result<()> {
    let mut rows = Vec::new();
    for layer in ["tcp-raw", "tcp, ipc", "tcp, no gate", "tcp", "tcp, relay"] {
        // Plain TCP has none.
        let segments = if layer == "tcp-raw" { &segments[..1] } else { segments };
        for (waiting, segment) in
            Waiting::ALL.into_iter().flat_map(|way| segments.iter().map(move |bytes| (way, *bytes)))
        {
            let mut name = format!("{layer}, {waiting}");
            if segments.len() > 1 {
                name += &format!(", {segment}");
            }
            if !name.contains(wanted) {
                continue;
            }
            let gate = match layer {
                "tcp, no gate" => Gate::Off,
                "tcp, relay" => Gate::Relay,
                _ => Gate::Filter,
            };
            let ipc = layer == "tcp, ipc";
            let congestion = congestion.clone();
            let options = TcpOptions { lanes: 1, waiting, gate, ipc, congestion, segment, ..TcpOptions::default() };
            let transport: Arc<dyn Transport> = match layer {
                "tcp-raw" => Arc::new(RawTcpTransport::connect(control, &options, soon())?),
                _ => Arc::new(ZmqTransport::connect(control, &options, soon())?),
            };
            rows.push(Row { name, transport, rates: Vec::new(), efforts: Vec::new(), trips: Vec::new() });
        }
    }
    for _ in 0..ROUNDS {
        for row in &mut rows {
            let (rate, effort) = one_way(&*row.transport)?;
            row.rates.push(rate);
            row.efforts.push(effort);
            row.trips.push(round_trips(&*row.transport)?);
        }
    }
    if control.rank() == 0 {
        println!("{:32} {:>24} {:>24} {:>28}", "", "1 MiB one way, GB/s", "CPU s/GB", "8 B round trip, µs");
        for row in &mut rows {
            let Row { name, rates, efforts, trips, .. } = row;
            println!("{name:32} {:>24} {:>24} {:>28}", spread(rates), spread(efforts), spread(trips));
        }
    }
    for row in &rows {
        if control.rank() == 1 {
            println!("{}: {:?}", row.name, row.transport.facts());
        }
        row.transport.close(soon())?;
    }
    Ok(())
}

/// GB/s from rank 0 to rank 1, until the receiver's word that it has everything, and the CPU time for a GB.
fn one_way(transport: &dyn Transport) -> Result<(f64, f64)> {
    let payload = vec![1; MESSAGE];
    let (start, cpu) = (Instant::now(), cpu_seconds());
    for _ in 0..MESSAGES {
        match transport.rank() {
            0 => send(transport, &payload)?,
            _ => receive(transport)?,
        }
    }
    match transport.rank() {
        0 => receive(transport)?,
        _ => send(transport, &[])?,
    }
    let gigabytes = (MESSAGES * MESSAGE) as f64 / 1e9;
    Ok((gigabytes / start.elapsed().as_secs_f64(), (cpu_seconds() - cpu) / gigabytes))
}

/// What all threads of this process have used, user and system.
fn cpu_seconds() -> f64 {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return f64::NAN };
    let nanoseconds = tasks.flatten().filter_map(|task| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<f64>().ok()
    });
    nanoseconds.sum::<f64>() / 1e9
}

/// Median time of a round trip, µs.
fn round_trips(transport: &dyn Transport) -> Result<f64> {
    let mut trips = Vec::with_capacity(PINGS);
    for _ in 0..PINGS {
        let start = Instant::now();
        match transport.rank() {
            0 => send(transport, &[0; 8]).and_then(|()| receive(transport))?,
            _ => receive(transport).and_then(|()| send(transport, &[0; 8]))?,
        }
        trips.push(start.elapsed().as_secs_f64() * 1e6);
    }
    trips.sort_by(f64::total_cmp);
    Ok(trips[PINGS / 2])
}

fn send(transport: &dyn Transport, payload: &[u8]) -> Result<()> {
    let header = Header {
        communicator: 1,
        sequence: 0,
        kind: OpKind::Send,
        dtype: DType::U8,
        reduce: None,
        algorithm: Algorithm::Direct,
        root: 0,
        count: payload.len() as u64,
        step: 0,
        division: 0,
        payload_len: payload.len() as u64,
    };
    transport.exchange(0, &[Outgoing { peer: 1 - transport.rank(), header, payload }], &mut [], soon())
}

fn receive(transport: &dyn Transport) -> Result<()> {
    let peer = 1 - transport.rank();
    transport.exchange(0, &[], &mut [Incoming { peer, sink: &mut Discard }], soon())
}

/// Looks at nothing: the figures are the transport's alone.
struct Discard;

impl Sink for Discard {
    fn begin(&mut self, _: &Header) -> Result<()> {
        Ok(())
    }

    fn piece(&mut self, bytes: &[u8]) -> Result<()> {
        std::hint::black_box(bytes);
        Ok(())
    }
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn spread(figures: &mut [f64]) -> String {
    figures.sort_by(f64::total_cmp);
    match &*figures {
        [] => String::new(),
        sorted @ [least, .., greatest] => format!("{:.2} ({least:.2}–{greatest:.2})", sorted[sorted.len() / 2]),
        [only] => format!("{only:.2}"),
    }
}
