//! What messages between two ranks in shared memory cost: `cargo run --release -p comm-core --example shm_latency [rounds [ring bytes [small-pages]]]`.
//!
//! Two processes; every way to wait, with long messages copied once and twice, is measured in every round, in turn, so that whatever else
//! the machine does meets all of them. Printed are the median over the rounds, and the lowest and highest.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use comm_core::control::TcpControl;
use comm_core::job::Job;
use comm_core::launch::{Launch, Output};
use comm_core::shm::{ShmOptions, ShmTransport};
use comm_core::{Algorithm, OpKind};
use comm_core::{
    Buffer, CommunicatorExt, Control, DType, Deadline, Error, Header, Incoming, Mesh, MeshOptions, Op, Outgoing,
    ReduceOp, Result, Sink, Transport, Waiting, prefer_huge_pages,
};

/// No exchange here takes longer unless something is broken.
const TIMEOUT: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    match Job::from_env() {
        Ok(Some(job)) => match measure(&job) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("rank {}: {error}", job.rank);
                ExitCode::FAILURE
            }
        },
        Ok(None) => match launch() {
            Ok(code) => code,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        },
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn launch() -> Result<ExitCode> {
    let program = std::env::current_exe().map_err(|error| Error::io("the path of this program", error))?;
    let launch = Launch {
        args: std::env::args_os().skip(1).collect(),
        output: Output::RankZeroPlain,
        ..Launch::new(program, 2)
    };
    let outcome = launch.run()?;
    if let Some(cause) = outcome.cause {
        eprintln!("{cause}");
    }
    Ok(if outcome.code == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// One way to wait and to copy, with everything connected and its results so far.
struct Subject {
    waiting: Waiting,
    /// Whether long messages are copied once.
    single_copy: bool,
    mesh: Mesh<Arc<ShmTransport>>,
    transport: Arc<ShmTransport>,
    results: Vec<Vec<f64>>,
}

/// What is measured: a name, a unit, and the time of one or the speed.
struct Quantity {
    name: &'static str,
    unit: &'static str,
    measure: fn(&Subject) -> Result<f64>,
}

const QUANTITIES: [Quantity; 12] = [
    Quantity { name: "copy 1 MiB", unit: "GB/s", measure: |subject| subject.copy(1 << 20, 100) },
    Quantity { name: "copy 16 MiB", unit: "GB/s", measure: |subject| subject.copy(16 << 20, 4) },
    Quantity { name: "round trip 8 B", unit: "us", measure: |subject| subject.round_trip(8, 2000) },
    Quantity { name: "one way 1 MiB", unit: "GB/s", measure: |subject| subject.one_way(1 << 20, 200) },
    Quantity { name: "both ways 4 B", unit: "us", measure: |subject| subject.both_ways(4, 2000) },
    Quantity { name: "both ways 64 KiB", unit: "us", measure: |subject| subject.both_ways(64 << 10, 200) },
    Quantity { name: "both ways 1 MiB", unit: "us", measure: |subject| subject.both_ways(1 << 20, 50) },
    Quantity { name: "both ways 16 MiB", unit: "us", measure: |subject| subject.both_ways(16 << 20, 4) },
    Quantity { name: "all-reduce 4 B", unit: "us", measure: |subject| subject.all_reduce(1, 2000) },
    Quantity { name: "all-reduce 1 MiB", unit: "us", measure: |subject| subject.all_reduce(1 << 18, 50) },
    Quantity { name: "all-reduce 4 MiB", unit: "us", measure: |subject| subject.all_reduce(1 << 20, 16) },
    Quantity { name: "all-reduce 16 MiB", unit: "us", measure: |subject| subject.all_reduce(1 << 22, 4) },
];

fn measure(job: &Job) -> Result<()> {
    let rounds = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(15);
    let ring_bytes =
        std::env::args().nth(2).and_then(|text| text.parse().ok()).unwrap_or(ShmOptions::default().ring_bytes);
    let control = TcpControl::connect(job, &[], Deadline::after(TIMEOUT))?;
    let mut subjects = Vec::new();
    for (waiting, single_copy) in Waiting::ALL.into_iter().flat_map(|waiting| [(waiting, true), (waiting, false)]) {
        let options = ShmOptions { lanes: 1, waiting, ring_bytes, single_copy };
        let transport = Arc::new(ShmTransport::connect(&*control, &options, Deadline::after(TIMEOUT))?);
        let mesh = Mesh::new(transport.clone(), control.clone(), MeshOptions::default())?;
        subjects.push(Subject { waiting, single_copy, mesh, transport, results: vec![Vec::new(); QUANTITIES.len()] });
    }
    // The first round warms up.
    for round in 0..=rounds {
        for subject in &mut subjects {
            for (place, quantity) in QUANTITIES.iter().enumerate() {
                subject.mesh.barrier()?;
                let result = (quantity.measure)(subject)?;
                if round > 0 {
                    subject.results[place].push(result);
                }
            }
        }
    }
    if job.rank == 0 {
        println!("2 processes, rings of {ring_bytes} B, {rounds} rounds; median (lowest .. highest)");
        for (place, quantity) in QUANTITIES.iter().enumerate() {
            for subject in &mut subjects {
                let results = &mut subject.results[place];
                results.sort_by(f64::total_cmp);
                let (median, highest) = (results[results.len() / 2], results[results.len() - 1]);
                println!(
                    "{:18} {:9} {:7} {median:9.2} {:4} ({:.2} .. {highest:.2})",
                    quantity.name,
                    subject.waiting,
                    if subject.single_copy { "1 copy" } else { "2 copies" },
                    quantity.unit,
                    results[0]
                );
            }
        }
    }
    for subject in &subjects {
        subject.transport.close(Deadline::after(TIMEOUT))?;
    }
    control.leave(Deadline::after(TIMEOUT))
}

impl Subject {
    fn peer(&self) -> usize {
        1 - self.transport.rank()
    }

    fn exchange(&self, send: Option<&[u8]>, receive: Option<&mut [u8]>) -> Result<()> {
        let header = |payload: &[u8]| Header {
            communicator: 0,
            sequence: 0,
            kind: OpKind::Send,
            dtype: DType::U8,
            reduce: None,
            algorithm: Algorithm::Direct,
            root: 0,
            count: payload.len() as u64,
            division: 0,
            step: 0,
            payload_len: payload.len() as u64,
        };
        let peer = self.peer();
        let deadline = Deadline::after(TIMEOUT);
        let outgoing = send.map(|payload| Outgoing { peer, header: header(payload), payload });
        let mut sink = receive.map(|into| Copy { into, filled: 0 });
        let mut incoming = sink.as_mut().map(|sink| Incoming { peer, sink });
        self.transport.exchange(0, outgoing.as_slice(), incoming.as_mut_slice(), deadline)
    }

    /// Microseconds.
    fn round_trip(&self, bytes: usize, times: u32) -> Result<f64> {
        let (ours, mut theirs) = (buffer(bytes, 1u8), buffer(bytes, 2u8));
        let began = Instant::now();
        for _ in 0..times {
            if self.transport.rank() == 0 {
                self.exchange(Some(&ours), None)?;
                self.exchange(None, Some(&mut theirs))?;
            } else {
                self.exchange(None, Some(&mut theirs))?;
                self.exchange(Some(&ours), None)?;
            }
        }
        Ok(micros(began, times))
    }

    /// Gigabytes in a second, from rank 0 to rank 1.
    fn one_way(&self, bytes: usize, times: u32) -> Result<f64> {
        let (ours, mut theirs) = (buffer(bytes, 1u8), buffer(bytes, 2u8));
        let began = Instant::now();
        for _ in 0..times {
            if self.transport.rank() == 0 {
                self.exchange(Some(&ours), None)?;
            } else {
                self.exchange(None, Some(&mut theirs))?;
            }
        }
        // The last ones may still be on their way.
        self.mesh.barrier()?;
        Ok(bytes as f64 / micros(began, times) / 1e3)
    }

    /// Microseconds.
    fn both_ways(&self, bytes: usize, times: u32) -> Result<f64> {
        let (ours, mut theirs) = (buffer(bytes, 1u8), buffer(bytes, 2u8));
        let began = Instant::now();
        for _ in 0..times {
            self.exchange(Some(&ours), Some(&mut theirs))?;
        }
        Ok(micros(began, times))
    }

    /// Gigabytes in a second that a plain copy writes, both ranks at once.
    fn copy(&self, bytes: usize, times: u32) -> Result<f64> {
        let (ours, mut theirs) = (buffer(bytes, 1u8), buffer(bytes, 2u8));
        let began = Instant::now();
        for _ in 0..times {
            theirs.copy_from_slice(std::hint::black_box(&ours));
            std::hint::black_box(&mut theirs);
        }
        Ok(bytes as f64 / micros(began, times) / 1e3)
    }

    /// Microseconds.
    fn all_reduce(&self, count: usize, times: u32) -> Result<f64> {
        let mut buffer = Buffer::from_vec(buffer(count, 1f32));
        let began = Instant::now();
        for _ in 0..times {
            buffer = self.mesh.run(Op::AllReduce(ReduceOp::Max), buffer)?;
        }
        Ok(micros(began, times))
    }
}

/// A long one lies in huge pages, unless this program was told otherwise.
fn buffer<T: bytemuck::Pod>(count: usize, value: T) -> Vec<T> {
    let mut buffer = vec![T::zeroed(); count];
    if std::env::args().nth(3).as_deref() != Some("small-pages") {
        prefer_huge_pages(&mut buffer);
    }
    buffer.fill(value);
    buffer
}

fn micros(began: Instant, times: u32) -> f64 {
    began.elapsed().as_secs_f64() * 1e6 / f64::from(times)
}

/// Takes a message of the length it has room for.
struct Copy<'a> {
    into: &'a mut [u8],
    filled: usize,
}

impl Sink for Copy<'_> {
    fn begin(&mut self, header: &Header) -> Result<()> {
        if header.payload_len == self.into.len() as u64 {
            Ok(())
        } else {
            Err(Error::invalid(format!("{} B where {} were expected", header.payload_len, self.into.len())))
        }
    }

    fn piece(&mut self, bytes: &[u8]) -> Result<()> {
        self.into[self.filled..self.filled + bytes.len()].copy_from_slice(bytes);
        self.filled += bytes.len();
        Ok(())
    }

    fn space(&mut self) -> Option<&mut [u8]> {
        Some(&mut self.into[self.filled..])
    }

    fn filled(&mut self, count: usize) -> Result<()> {
        self.filled += count;
        Ok(())
    }
}
