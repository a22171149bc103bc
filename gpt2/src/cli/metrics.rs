//! What Prometheus and a supervisor may ask a run: `gpt2 train --metrics`.
//!
//! A minimal HTTP/1.1 server in threads of its own, from the standard library alone. Whoever can reach the port may read the figures, and cannot
//! hold up training: connections come one after another at a bounded rate, few are open at a time, each has a short while in all, a request
//! has a bounded length, and nothing that is sent changes anything.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use super::{CliError, of_system};
use crate::trainer::{Restarts, StepReport, median};

/// Most connections at a time; with one more the oldest is closed.
const MOST: usize = 16;

/// How long a connection may take in all.
const TIME: Duration = Duration::from_secs(2);

/// Time between two connections that are accepted: what floods of them cost is bounded.
const BETWEEN: Duration = Duration::from_millis(5);

/// Longest head of a request, in bytes.
const LONGEST: usize = 4096;

/// Steps whose median is the usual time of one.
const USUAL: usize = 64;

/// However fast steps are, a pause of this is no failure.
const LEAST_PAUSE: Duration = Duration::from_secs(10);

/// Longest time from the start to training, and from there to the end of the first step: nothing is known yet of how long one takes, and texts
/// are encoded and kernels compiled.
const FIRST: Duration = Duration::from_secs(30 * 60);

/// Serves the figures of a run until it is dropped.
pub(super) struct Metrics {
    shared: Arc<Shared>,
    address: SocketAddr,
    server: Option<JoinHandle<()>>,
}

/// What does not change during a run.
#[derive(Clone, Debug, Default)]
pub(super) struct RunFacts {
    /// Pairs of a label and its value.
    pub(super) labels: Vec<(&'static str, String)>,
    /// Starts before this one.
    pub(super) restarts: Restarts,
    /// Usual times of a step without one after which the run counts as unhealthy.
    pub(super) unhealthy_after: f64,
}

struct Shared {
    facts: RunFacts,
    figures: Mutex<Figures>,
    /// Those that are open, the oldest first.
    connections: Mutex<VecDeque<Arc<TcpStream>>>,
    ends: AtomicBool,
}

#[derive(Debug)]
struct Figures {
    /// When this start or, later, its training began.
    since: Instant,
    steps: u64,
    step: Option<LastStep>,
    validation_loss: Option<f64>,
    checkpoint_step: Option<u64>,
    tokens: f64,
    bytes: u64,
    exposed_ms: f64,
    skipped: u64,
    /// Milliseconds of the last steps, of which the next replaces the oldest.
    times: Vec<f64>,
    next: usize,
}

impl Figures {
    fn new() -> Self {
        Figures {
            since: Instant::now(),
            steps: 0,
            step: None,
            validation_loss: None,
            checkpoint_step: None,
            tokens: 0.0,
            bytes: 0,
            exposed_ms: 0.0,
            skipped: 0,
            times: Vec::new(),
            next: 0,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct LastStep {
    number: u64,
    ended: Instant,
    at: SystemTime,
    loss: f64,
    grad_norm: f64,
    learning_rate: f64,
    ms: f64,
    exposed_ms: f64,
    tokens_per_s: f64,
}

impl Metrics {
    /// # Errors
    /// The address cannot be listened on.
    pub(super) fn serve(address: SocketAddr, facts: RunFacts) -> Result<Self, CliError> {
        let listener = listen(address)?;
        let cannot = |error| cannot(address, &error);
        let address = listener.local_addr().map_err(cannot)?;
        let shared = Arc::new(Shared::new(facts));
        let of_server = shared.clone();
        let server = thread::Builder::new()
            .name("metrics".into())
            .stack_size(STACK)
            .spawn(move || accept(&listener, &of_server))
            .map_err(cannot)?;
        Ok(Metrics { shared, address, server: Some(server) })
    }

    /// Where it listens.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn started(&self, steps: u64) {
        let figures = &mut *self.shared.figures();
        figures.steps = steps;
        figures.since = Instant::now();
    }

    pub(super) fn step(&self, report: &StepReport) {
        let figures = &mut *self.shared.figures();
        figures.tokens += report.tokens_per_s * report.ms / 1e3;
        figures.bytes += report.bytes_sent.unwrap_or(0);
        figures.exposed_ms += report.parts.exposed;
        figures.skipped += u64::from(report.skipped);
        if figures.times.len() < USUAL {
            figures.times.push(report.ms);
        } else {
            figures.times[figures.next] = report.ms;
        }
        figures.next = (figures.next + 1) % USUAL;
        figures.step = Some(LastStep {
            number: report.step,
            ended: Instant::now(),
            at: SystemTime::now(),
            loss: report.loss,
            grad_norm: report.grad_norm,
            learning_rate: report.learning_rate,
            ms: report.ms,
            exposed_ms: report.parts.exposed,
            tokens_per_s: report.tokens_per_s,
        });
    }

    pub(super) fn validation(&self, loss: f64) {
        self.shared.figures().validation_loss = Some(loss);
    }

    pub(super) fn saved(&self, step: u64) {
        self.shared.figures().checkpoint_step = Some(step);
    }
}

/// # Errors
/// The address cannot be listened on.
pub(super) fn listen(address: SocketAddr) -> Result<TcpListener, CliError> {
    TcpListener::bind(address).map_err(|error| of_system(error.kind(), cannot(address, &error)))
}

fn cannot(address: SocketAddr, error: &std::io::Error) -> String {
    format!("--metrics {address}: cannot listen on it: {error}; give another address")
}

impl Drop for Metrics {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        // The server waits for a connection.
        let host = match self.address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            ip => ip,
        };
        let woken = TcpStream::connect_timeout(&SocketAddr::new(host, self.address.port()), TIME);
        if let (Ok(_), Some(server)) = (woken, self.server.take()) {
            let _ = server.join();
        }
    }
}

/// Bytes of a thread's stack.
const STACK: usize = 256 << 10;

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    loop {
        let accepted = listener.accept();
        if shared.ends.load(Ordering::Relaxed) {
            return;
        }
        match accepted {
            Ok((connection, _)) => {
                let connection = Arc::new(connection);
                shared.opened(&connection);
                let (of_connection, answered) = (shared.clone(), connection.clone());
                let answer = move || {
                    // Whoever asked may have gone.
                    let _ = answer(&answered, &of_connection);
                    of_connection.closed(&answered);
                };
                let thread = thread::Builder::new().name("metrics".into()).stack_size(STACK).spawn(answer);
                if thread.is_err() {
                    shared.closed(&connection);
                }
                thread::sleep(BETWEEN);
            }
            // No descriptors left, say.
            Err(_) => thread::sleep(Duration::from_millis(100)),
        }
    }
}

/// Reads one request, and answers it.
fn answer(mut connection: &TcpStream, shared: &Shared) -> std::io::Result<()> {
    let deadline = Instant::now() + TIME;
    let request = read_head(connection, deadline)?;
    let Response { status, body } = match &request {
        Some(head) => shared.respond(head),
        None => Response { status: "431 Request Header Fields Too Large", body: "the request is too long\n".into() },
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let is_head = request.is_some_and(|head| head.starts_with(b"HEAD "));
    let bytes = [head.as_bytes(), if is_head { b"" } else { body.as_bytes() }].concat();
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        connection.set_write_timeout(Some(left(deadline)?))?;
        let written = connection.write(rest)?;
        rest = &rest[written..];
        if written == 0 {
            return Err(ErrorKind::WriteZero.into());
        }
    }
    connection.shutdown(Shutdown::Write)?;
    // With bytes that are not read, closing would be a reset, and take the answer from whoever asked.
    let mut block = [0; 4096];
    loop {
        connection.set_read_timeout(Some(left(deadline)?))?;
        if connection.read(&mut block)? == 0 {
            return Ok(());
        }
    }
}

/// Up to the empty line; `None` where that does not come in [`LONGEST`] bytes.
fn read_head(mut connection: &TcpStream, deadline: Instant) -> std::io::Result<Option<Vec<u8>>> {
    let mut head = Vec::new();
    let mut block = [0; 1024];
    loop {
        connection.set_read_timeout(Some(left(deadline)?))?;
        let read = connection.read(&mut block)?;
        if read == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        head.extend_from_slice(&block[..read]);
        if head.windows(4).any(|four| four == b"\r\n\r\n") || head.windows(2).any(|two| two == b"\n\n") {
            return Ok(Some(head));
        }
        if head.len() > LONGEST {
            return Ok(None);
        }
    }
}

/// The time until the deadline, which has not passed.
fn left(deadline: Instant) -> std::io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

struct Response {
    status: &'static str,
    body: String,
}

impl Shared {
    fn new(facts: RunFacts) -> Self {
        Shared {
            facts,
            figures: Mutex::new(Figures::new()),
            connections: Mutex::default(),
            ends: AtomicBool::new(false),
        }
    }

    fn connections(&self) -> std::sync::MutexGuard<'_, VecDeque<Arc<TcpStream>>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room for a new connection: whoever says nothing does not keep others away.
    fn opened(&self, connection: &Arc<TcpStream>) {
        let mut open = self.connections();
        if open.len() >= MOST
            && let Some(oldest) = open.pop_front()
        {
            // Its thread ends. It may have gone by itself.
            let _ = oldest.shutdown(Shutdown::Both);
        }
        open.push_back(connection.clone());
    }

    fn closed(&self, connection: &Arc<TcpStream>) {
        self.connections().retain(|open| !Arc::ptr_eq(open, connection));
    }

    fn figures(&self) -> std::sync::MutexGuard<'_, Figures> {
        self.figures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn respond(&self, head: &[u8]) -> Response {
        let line = head.split(|byte| *byte == b'\n').next().unwrap_or_default().trim_ascii_end();
        let mut words = line.split(|byte| *byte == b' ');
        let (method, target, version) = (words.next(), words.next(), words.next());
        if !matches!(version, Some(b"HTTP/1.1" | b"HTTP/1.0")) || words.next().is_some() {
            return Response { status: "400 Bad Request", body: "this is not an HTTP/1.1 request\n".into() };
        }
        if !matches!(method, Some(b"GET" | b"HEAD")) {
            return Response { status: "405 Method Not Allowed", body: "only GET and HEAD are answered\n".into() };
        }
        let path = target.unwrap_or_default().split(|byte| *byte == b'?').next();
        match path {
            Some(b"/metrics") => Response { status: "200 OK", body: self.metrics() },
            Some(b"/health") => match self.health(Instant::now()) {
                Ok(body) => Response { status: "200 OK", body },
                Err(body) => Response { status: "503 Service Unavailable", body },
            },
            _ => Response { status: "404 Not Found", body: "there are /metrics and /health\n".into() },
        }
    }

    /// One line that says how the run is; an error where steps have ceased.
    fn health(&self, now: Instant) -> Result<String, String> {
        let figures = self.figures();
        let Some(last) = figures.step else {
            let pause = now.saturating_duration_since(figures.since);
            let line = format!(
                "no step has ended yet after {:.1} s, and {} s are allowed\n",
                pause.as_secs_f64(),
                FIRST.as_secs()
            );
            return if pause <= FIRST { Ok(line) } else { Err(line) };
        };
        let usual = Duration::from_secs_f64(median(figures.times.iter().copied()).max(0.0) / 1e3);
        let allowed = usual.mul_f64(self.facts.unhealthy_after).max(LEAST_PAUSE);
        let pause = now.saturating_duration_since(last.ended);
        let line = format!(
            "step {} of {} ended {:.1} s ago; the usual step takes {:.3} s, and {:.1} s are allowed\n",
            last.number,
            figures.steps,
            pause.as_secs_f64(),
            usual.as_secs_f64(),
            allowed.as_secs_f64()
        );
        if pause <= allowed { Ok(line) } else { Err(line) }
    }

    /// All figures in Prometheus' text format.
    fn metrics(&self) -> String {
        let mut text = String::new();
        let labels = self.facts.labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value)));
        let labels = labels.collect::<Vec<_>>().join(",");
        let _ = writeln!(
            text,
            "# HELP gpt2_run_info Strategy, transport and other settings of the run.\n# TYPE gpt2_run_info gauge\ngpt2_run_info{{{labels}}} 1"
        );
        let figures = self.figures();
        let mut put = |name: &str, kind: &str, help: &str, value: Option<f64>| {
            let Some(value) = value else { return };
            let _ =
                writeln!(text, "# HELP gpt2_{name} {help}\n# TYPE gpt2_{name} {kind}\ngpt2_{name} {}", number(value));
        };
        let last = |of: fn(&LastStep) -> f64| figures.step.as_ref().map(of);
        let ended = figures.step.and_then(|step| step.at.duration_since(SystemTime::UNIX_EPOCH).ok());
        let Restarts { count, steps_lost } = self.facts.restarts;
        put("steps", "gauge", "Steps of the whole run.", Some(figures.steps as f64));
        put("step", "gauge", "Steps that have ended.", last(|step| step.number as f64));
        put("loss", "gauge", "Training loss of the last step, in nats a token.", last(|step| step.loss));
        put("validation_loss", "gauge", "Loss of the last validation, in nats a token.", figures.validation_loss);
        put(
            "gradient_norm",
            "gauge",
            "Global norm of the last step's gradient before clipping.",
            last(|step| step.grad_norm),
        );
        put("learning_rate", "gauge", "Learning rate of the last step.", last(|step| step.learning_rate));
        put(
            "tokens_per_second",
            "gauge",
            "Tokens of all ranks a second in the last step.",
            last(|step| step.tokens_per_s),
        );
        put("step_seconds", "gauge", "Time of the last step.", last(|step| step.ms / 1e3));
        put(
            "exposed_communication_seconds",
            "gauge",
            "Time of the last step in which rank 0 waited for gradients and parameters.",
            last(|step| step.exposed_ms / 1e3),
        );
        put(
            "last_step_timestamp_seconds",
            "gauge",
            "Time at which the last step ended, in seconds since 1970.",
            ended.map(|since| since.as_secs_f64()),
        );
        put("tokens_total", "counter", "Tokens of all ranks since this start.", Some(figures.tokens.round()));
        put(
            "sent_bytes_total",
            "counter",
            "Payload bytes that rank 0 has sent for gradients and parameters since this start.",
            Some(figures.bytes as f64),
        );
        put(
            "exposed_communication_seconds_total",
            "counter",
            "Time in which rank 0 has waited for gradients and parameters since this start.",
            Some(figures.exposed_ms / 1e3),
        );
        put(
            "skipped_steps_total",
            "counter",
            "Steps skipped because of an overflow since this start.",
            Some(figures.skipped as f64),
        );
        put(
            "checkpoint_step",
            "gauge",
            "Step of the last checkpoint since this start.",
            figures.checkpoint_step.map(|step| step as f64),
        );
        put("restarts_total", "counter", "Restarts of the job before this start.", Some(count as f64));
        put("lost_steps_total", "counter", "Steps repeated because of restarts.", Some(steps_lost as f64));
        text
    }
}

/// A value as Prometheus reads it.
fn number(value: f64) -> String {
    if value.is_finite() || value.is_nan() {
        value.to_string()
    } else {
        format!("{}Inf", if value > 0.0 { '+' } else { '-' })
    }
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(unhealthy_after: f64) -> Shared {
        let labels = vec![("strategy", "a \"b\"\\".to_owned())];
        Shared::new(RunFacts { labels, restarts: Restarts { count: 2, steps_lost: 7 }, unhealthy_after })
    }

    fn status(shared: &Shared, request: &str) -> &'static str {
        &shared.respond(request.as_bytes()).status[..3]
    }

    #[test]
    fn a_run_without_a_step_for_long_is_unhealthy() {
        let shared = shared(20.0);
        let start = Instant::now();
        // The run that this one is a restart of says nothing of how long the first step takes.
        assert!(shared.health(start + FIRST - Duration::from_secs(1)).unwrap().starts_with("no step has ended yet"));
        let error = shared.health(start + FIRST + Duration::from_secs(1)).unwrap_err();
        assert!(error.contains("no step has ended yet after 180") && error.contains("1800 s are allowed"), "{error}");
        let step = |ms: f64| {
            let figures = &mut *shared.figures();
            figures.times = vec![ms; 3];
            figures.step = Some(LastStep {
                number: 3,
                ended: start,
                at: SystemTime::now(),
                loss: f64::NAN,
                grad_norm: f64::INFINITY,
                learning_rate: 0.5,
                ms,
                exposed_ms: 1.0,
                tokens_per_s: 8.0,
            });
        };
        for (ms, allowed) in [(1.0, 10), (2_000.0, 40)] {
            step(ms);
            assert!(shared.health(start + Duration::from_secs(allowed)).is_ok());
            let error = shared.health(start + Duration::from_secs(allowed + 1)).unwrap_err();
            assert!(error.contains("step 3 of 0 ended"), "{error}");
        }
        step(1.0);
        assert_eq!(status(&shared, "GET /health HTTP/1.1\r\n\r\n"), "200");
        let metrics = shared.metrics();
        for line in [
            "gpt2_run_info{strategy=\"a \\\"b\\\"\\\\\"} 1",
            "gpt2_loss NaN",
            "gpt2_gradient_norm +Inf",
            "gpt2_step_seconds 0.001",
            "# TYPE gpt2_restarts_total counter",
            "gpt2_restarts_total 2",
            "gpt2_lost_steps_total 7",
        ] {
            assert!(metrics.lines().any(|found| found == line), "{line} is not in {metrics}");
        }
        assert!(!metrics.contains("gpt2_validation_loss"), "{metrics}");
    }

    #[test]
    fn any_bytes_are_a_request_or_none() {
        let shared = shared(20.0);
        let mut random = comm_core::splitmix::SplitMix64::new(1);
        let good = b"GET /metrics?a=b HTTP/1.1\r\nHost: here\r\n\r\n";
        for _ in 0..20_000 {
            let mut head = good.to_vec();
            head.truncate(random.below(good.len() as u64 + 1) as usize);
            for _ in 0..random.below(4) {
                let at = random.below(good.len() as u64) as usize;
                if let Some(byte) = head.get_mut(at) {
                    *byte = random.next_u64() as u8;
                }
            }
            let Response { status, body } = shared.respond(&head);
            assert!(
                ["200", "400", "404", "405"].contains(&&status[..3]) && !body.is_empty(),
                "{}",
                head.escape_ascii()
            );
        }
        assert_eq!(status(&shared, std::str::from_utf8(good).unwrap()), "200");
    }

    /// What is answered to `request` in full, however much of it is read.
    fn ask(address: SocketAddr, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.write_all(request).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn who_says_nothing_or_too_much_keeps_no_answer_from_anyone() {
        let metrics = Metrics::serve("127.0.0.1:0".parse().unwrap(), RunFacts::default()).unwrap();
        let address = metrics.address();
        let mut silent: Vec<_> = (0..MOST + 8).map(|_| TcpStream::connect(address).unwrap()).collect();
        let request = b"GET /health HTTP/1.1\r\n\r\n";
        assert!(ask(address, request).starts_with("HTTP/1.1 200 OK\r\n"));
        // The oldest made room.
        silent[0].set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert_eq!(silent[0].read(&mut [0]).unwrap(), 0);
        assert!(metrics.shared.connections().len() <= MOST);

        let long = [b"GET /", "x".repeat(20 * LONGEST).as_bytes()].concat();
        assert!(ask(address, &long).starts_with("HTTP/1.1 431 "));
        let (whole, head) = (ask(address, b"GET / HTTP/1.1\r\n\r\n"), ask(address, b"HEAD / HTTP/1.1\r\n\r\n"));
        assert_eq!(Some(&*head), whole.strip_suffix("there are /metrics and /health\n"));
    }

    #[test]
    fn a_server_ends_with_its_run_and_leaves_the_port() {
        let metrics = Metrics::serve("127.0.0.1:0".parse().unwrap(), RunFacts::default()).unwrap();
        let address = metrics.address();
        drop(metrics);
        drop(Metrics::serve(address, RunFacts::default()).unwrap());
    }
}
