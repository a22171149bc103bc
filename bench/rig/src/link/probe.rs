//! What a link really does, measured by one TCP connection before anything else is.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use comm_core::job::{self, Job};
use serde::{Deserialize, Serialize};

use super::TestNetwork;
use crate::BenchError;
use crate::interrupts::uninterrupted;
use crate::outcome::{self, RunError};
use crate::rank::this_program;

#[derive(Debug, clap::Args)]
pub struct ProbeArgs {
    /// Where rank 0 listens and rank 1 dials.
    address: SocketAddr,
}

/// What was measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Probe {
    /// What one TCP connection delivers in one direction.
    pub mbit_per_s: f64,
    /// Median round trip of one byte.
    pub round_trip_us: f64,
}

/// How long data is counted.
const LENGTH: Duration = Duration::from_millis(500);

/// Longest wait for the other end.
const PATIENCE: Duration = Duration::from_secs(10);

const ROUND_TRIPS: usize = 50;

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0} Mbit/s, round trip {:.0} µs", self.mbit_per_s, self.round_trip_us)
    }
}

impl Probe {
    /// Measures what is between the first two ends of a link; `None` on loopback.
    ///
    /// # Errors
    /// Why it cannot be, or that the user interrupted it.
    pub fn of(network: &TestNetwork) -> Result<Option<Probe>, RunError> {
        let Some(ends) = network.addresses() else { return Ok(None) };
        let (host, port) = ends.meeting();
        let arguments = vec!["link-probe".into(), format!("{host}:{port}").into()];
        let launch = network.launch(&this_program()?, arguments, 2, 3 * PATIENCE)?;
        let captured = outcome::run(&launch)?;
        let said = captured.first().map_or("", |rank| rank.stdout.trim());
        let probe =
            serde_json::from_str(said).map_err(|error| format!("the probe of the link printed {said:?}: {error}"))?;
        Ok(Some(probe))
    }
}

/// One end of the measurement.
pub fn run_probe(args: &ProbeArgs) -> Result<ExitCode, BenchError> {
    job::die_with_parent()?;
    let job =
        Job::from_env()?.ok_or("link-probe is an internal command: a launcher starts it as one rank of its job")?;
    if job.rank == 0 {
        println!("{}", serde_json::to_string(&listen(args.address)?)?);
    } else {
        dial(args.address)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Measures round trips, then counts what comes for a while, and goes.
fn listen(address: SocketAddr) -> io::Result<Probe> {
    let listener = TcpListener::bind(address)?;
    let mut stream = accept(&listener)?;
    let mut times = Vec::with_capacity(ROUND_TRIPS);
    let mut byte = [0];
    for _ in 0..ROUND_TRIPS {
        let began = Instant::now();
        stream.write_all(&byte)?;
        stream.read_exact(&mut byte)?;
        times.push(began.elapsed());
    }
    times.sort_unstable();
    // Says that data may come.
    stream.write_all(&[1])?;
    let mut bytes = vec![0; 1 << 18];
    let (mut total, mut last) = (0, Duration::ZERO);
    stream.read_exact(&mut byte)?;
    let began = Instant::now();
    while began.elapsed() < LENGTH {
        let count = uninterrupted(|| stream.read(&mut bytes))?;
        if count == 0 {
            break;
        }
        total += count;
        last = began.elapsed();
    }
    let seconds = last.as_secs_f64().max(1e-6);
    let round_trip = times.get(times.len() / 2).copied().unwrap_or_default();
    Ok(Probe { mbit_per_s: total as f64 * 8e-6 / seconds, round_trip_us: round_trip.as_secs_f64() * 1e6 })
}

/// Answers round trips, then sends until the other end goes.
fn dial(address: SocketAddr) -> io::Result<()> {
    let mut stream = connect(address)?;
    let mut byte = [0];
    loop {
        stream.read_exact(&mut byte)?;
        if byte == [1] {
            break;
        }
        stream.write_all(&byte)?;
    }
    let bytes = vec![0; 1 << 18];
    let began = Instant::now();
    while began.elapsed() < PATIENCE {
        // The other end has closed with data unread: that is how it says that it has enough.
        if stream.write(&bytes).is_err() {
            return Ok(());
        }
    }
    Err(io::Error::other(format!("the other end of the link did not end the measurement within {PATIENCE:?}")))
}

fn accept(listener: &TcpListener) -> io::Result<TcpStream> {
    listener.set_nonblocking(true)?;
    let began = Instant::now();
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return ready(stream);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && began.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let text = format!("the other end of the link did not connect within {PATIENCE:?}");
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            Err(error) => return Err(error),
        }
    }
}

fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    let began = Instant::now();
    loop {
        match TcpStream::connect_timeout(&address, PATIENCE) {
            Ok(stream) => return ready(stream),
            Err(_) if began.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => return Err(error),
        }
    }
}

fn ready(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_ends_measure_what_is_between_them() {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let dialling = std::thread::spawn(move || dial(free));
        let probe = listen(free).unwrap();
        dialling.join().unwrap().unwrap();
        assert!(probe.mbit_per_s > 10.0 && probe.round_trip_us > 0.0, "{probe:?}");
    }
}
