//! What each layer costs: one-way throughput and round trips of raw TCP, ZeroMQ without its gate, and ZeroMQ with it, between
//! two ranks that are threads of this process.
//!
//! ```text
//! cargo run --release -p comm-tcp --example ladder [-- CONGESTION_CONTROL]
//! ```
//!
//! Transports take turns, so that a busy moment of the machine hits all of them; each figure is a median with the least and
//! the greatest of the rounds. Figures of a debug build mean nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use comm_core::{
    Algorithm, Control, DType, Deadline, Error, Header, Incoming, OpKind, Outgoing, Result, Sink, Transport,
};
use comm_tcp::{RawTcpTransport, TcpOptions, ZmqTransport};

const ROUNDS: usize = 7;
const MESSAGES: usize = 500;
const MESSAGE: usize = 1 << 20;
const PINGS: usize = 2000;

const LADDER: [&str; 3] = ["tcp-raw", "tcp, no gate", "tcp"];

fn main() -> Result<()> {
    let congestion = std::env::args().nth(1);
    if cfg!(debug_assertions) {
        println!("This is a debug build: the figures mean nothing.");
    }
    let ranks = comm_core::local::group(2, 1);
    let threads: Vec<_> = ranks
        .into_iter()
        .map(|rank| {
            let congestion = congestion.clone();
            std::thread::spawn(move || measure(&*rank.control, congestion))
        })
        .collect();
    for thread in threads {
        thread.join().map_err(|_| Error::invalid("a rank panicked"))??;
    }
    Ok(())
}

fn measure(control: &dyn Control, congestion: Option<String>) -> Result<()> {
    let options = TcpOptions { lanes: 1, congestion, ..TcpOptions::default() };
    let open = TcpOptions { gate: false, ..options.clone() };
    let transports: [Arc<dyn Transport>; 3] = [
        Arc::new(RawTcpTransport::connect(control, &options, soon())?),
        Arc::new(ZmqTransport::connect(control, &open, soon())?),
        Arc::new(ZmqTransport::connect(control, &options, soon())?),
    ];
    let mut figures = [const { (Vec::new(), Vec::new()) }; 3];
    for _ in 0..ROUNDS {
        for (transport, (rates, trips)) in transports.iter().zip(&mut figures) {
            rates.push(one_way(&**transport)?);
            trips.push(round_trips(&**transport)?);
        }
    }
    if control.rank() == 0 {
        println!("{:14} {:>26} {:>30}", "", "1 MiB one way, GB/s", "8 B round trip, median µs");
        for (name, (rates, trips)) in LADDER.iter().zip(&mut figures) {
            println!("{name:14} {:>26} {:>30}", spread(rates), spread(trips));
        }
    }
    for transport in &transports {
        if control.rank() == 1 {
            println!("{}: {:?}", transport.name(), transport.facts());
        }
        transport.close(soon())?;
    }
    Ok(())
}

/// GB/s from rank 0 to rank 1, until the receiver's word that it has everything.
fn one_way(transport: &dyn Transport) -> Result<f64> {
    let payload = vec![1; MESSAGE];
    let start = Instant::now();
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
    Ok((MESSAGES * MESSAGE) as f64 / start.elapsed().as_secs_f64() / 1e9)
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
