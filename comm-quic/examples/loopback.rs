//! What a setting does on this machine: two ranks, as threads, send each other messages over loopback.
//!
//! `cargo run --release -p comm-quic --example loopback -- [CONGESTION] [MTU] [SEND_WINDOW] [STREAM_WINDOW]`
//!
//! Prints the rate of 1 MiB messages one way, the rate when both sides send at once, the median round trip of a 4-byte message,
//! and what the sender lost. Repeat it, alternating the settings to compare, on a machine that does nothing else.

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use comm_core::local::{LocalControl, group};
use comm_core::{Algorithm, Control, DType, Deadline, Header, Incoming, OpKind, Outgoing, Result, Sink, Transport};
use comm_quic::{QuicOptions, QuicTransport};

const MESSAGE: usize = 1 << 20;
const MESSAGES: usize = 512;
const ROUND_TRIPS: usize = 2000;

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let mut arguments = std::env::args().skip(1);
    let mut options = QuicOptions::default();
    if let Some(congestion) = arguments.next() {
        options.congestion = congestion.parse()?;
    }
    if let Some(mtu) = arguments.next().filter(|mtu| mtu != "largest") {
        options.mtu = Some(mtu.parse()?);
    }
    if let Some(window) = arguments.next() {
        options.send_window = window.parse()?;
    }
    if let Some(window) = arguments.next() {
        options.stream_window = window.parse()?;
    }
    thread::scope(|scope| {
        let ranks: Vec<_> = group(2, 1)
            .into_iter()
            .map(|rank| {
                let options = &options;
                scope.spawn(move || measure(&rank.control, options))
            })
            .collect();
        ranks.into_iter().try_for_each(|rank| rank.join().map_err(|_| "a rank panicked")?)
    })
}

fn measure(control: &LocalControl, options: &QuicOptions) -> Result<(), Box<dyn Error + Send + Sync>> {
    let deadline = Deadline::after(Duration::from_secs(120));
    let began = Instant::now();
    let transport = QuicTransport::connect(control, options, deadline)?;
    let connected = began.elapsed();
    let rank = control.rank();
    let payload = vec![1; MESSAGE];

    let mut one_way = Duration::ZERO;
    // The first round warms up.
    for _ in 0..2 {
        let began = Instant::now();
        for _ in 0..MESSAGES {
            match rank {
                0 => exchange(&transport, Some(&payload), false, deadline)?,
                _ => exchange(&transport, None, true, deadline)?,
            }
        }
        // The last message has arrived when the answer has.
        match rank {
            0 => exchange(&transport, None, true, deadline)?,
            _ => exchange(&transport, Some(&[0; 4]), false, deadline)?,
        }
        one_way = began.elapsed();
    }

    let began = Instant::now();
    for _ in 0..MESSAGES {
        exchange(&transport, Some(&payload), true, deadline)?;
    }
    let both_ways = began.elapsed();

    let mut trips: Vec<Duration> = Vec::with_capacity(ROUND_TRIPS);
    for _ in 0..ROUND_TRIPS {
        let began = Instant::now();
        if rank == 0 {
            exchange(&transport, Some(&[0; 4]), false, deadline)?;
            exchange(&transport, None, true, deadline)?;
        } else {
            exchange(&transport, None, true, deadline)?;
            exchange(&transport, Some(&[0; 4]), false, deadline)?;
        }
        trips.push(began.elapsed());
    }
    trips.sort_unstable();

    if rank == 0 {
        let rate = |time: Duration| (MESSAGE * MESSAGES) as f64 / time.as_secs_f64() / 1e9;
        let median = trips.get(ROUND_TRIPS / 2).copied().unwrap_or_default();
        for path in transport.paths() {
            println!(
                "{} mtu {} send_window {} stream_window {}: one way {:.2} GB/s, both ways {:.2} GB/s each, round trip {median:?}, {} of {} packets lost, {} calls, connect {connected:?}",
                options.congestion,
                path.mtu,
                options.send_window,
                options.stream_window,
                rate(one_way),
                rate(both_ways),
                path.lost_packets,
                path.sent_packets,
                path.send_calls,
            );
        }
    }
    let began = Instant::now();
    transport.close(deadline)?;
    if rank == 0 {
        println!("closed within {:?}", began.elapsed());
    }
    Ok(())
}

fn exchange(transport: &QuicTransport, payload: Option<&[u8]>, receive: bool, deadline: Deadline) -> Result<()> {
    let peer = 1 - transport.rank();
    let outgoing: Vec<Outgoing<'_>> =
        payload.into_iter().map(|payload| Outgoing { peer, header: header(payload.len()), payload }).collect();
    let mut sink = Discard;
    let mut incoming = Vec::new();
    if receive {
        incoming.push(Incoming { peer, sink: &mut sink });
    }
    transport.exchange(0, &outgoing, &mut incoming, deadline)
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
