//! Output that never holds up the thread that prints: text goes into a bounded queue, and a thread of its own writes it out.
//!
//! A pipe that is not read and a terminal that is stopped (Ctrl-S) block a thread that writes to them. In a rank that would be a failure of the
//! job: the others wait for it, and time out. Here only the writing thread waits. When the queue is full, the oldest text is dropped, and
//! how many lines that were is said in their place.
//!
//! Standard output and standard error have a queue each, unless both are the same file: then lines keep their order. A program calls
//! [`at_end`] at its start, or [`finish`] at its end, or what is still in the queues is lost.

use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::sys;

/// How long a program's end may wait for a reader that takes nothing.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Most bytes that wait for their reader.
const CAPACITY: usize = 16 << 20;

/// What a text takes beside its bytes.
const OVERHEAD: usize = 64;

/// Bytes of one write, at most: what a pipe takes in one piece, unmixed with what other processes write to it (PIPE_BUF).
const PIECE: usize = 4096;

/// How often [`Printer::finish`] looks.
const TICK: Duration = Duration::from_millis(50);

/// Prints to one file, pipe or terminal, and never waits for it. Clones share the queue.
#[derive(Clone)]
pub struct Printer {
    queue: Arc<Queue>,
    to: Target,
}

type Target = Arc<dyn AsFd + Send + Sync>;

/// Prints to standard output.
pub fn stdout() -> &'static Printer {
    &STREAMS.0
}

/// Prints to standard error.
pub fn stderr() -> &'static Printer {
    &STREAMS.1
}

/// [`Printer::finish`] for standard output and standard error. A program's end.
pub fn finish(drain_timeout: Duration) {
    stdout().finish(drain_timeout);
    stderr().finish(drain_timeout);
}

/// [`finish`] with the usual [timeout](DRAIN_TIMEOUT) when the result is dropped. The first thing that a program's `main` calls.
#[must_use = "what is printed is waited for when this is dropped"]
pub fn at_end() -> FlushAtEnd {
    FlushAtEnd(())
}

/// See [`at_end`].
#[derive(Debug)]
pub struct FlushAtEnd(());

impl Drop for FlushAtEnd {
    fn drop(&mut self) {
        finish(DRAIN_TIMEOUT);
    }
}

static STREAMS: LazyLock<(Printer, Printer)> = LazyLock::new(|| {
    let (out, error) = (io::stdout(), io::stderr());
    let one = same_file(out.as_fd(), error.as_fd());
    let out = Printer::new(out);
    let error = if one { out.to(error) } else { Printer::new(error) };
    (out, error)
});

impl Printer {
    /// Prints to `to`, from a queue of 16 MiB.
    pub fn new(to: impl AsFd + Send + Sync + 'static) -> Self {
        Self::with_capacity(to, CAPACITY)
    }

    fn with_capacity(to: impl AsFd + Send + Sync + 'static, capacity: usize) -> Self {
        let queue = Queue { capacity, state: Mutex::default(), filled: Condvar::new(), taken: Condvar::new() };
        Printer { queue: Arc::new(queue), to: Arc::new(to) }
    }

    /// Another file, from the same queue: everything comes out in the order in which it was printed.
    fn to(&self, to: impl AsFd + Send + Sync + 'static) -> Self {
        Printer { queue: Arc::clone(&self.queue), to: Arc::new(to) }
    }

    /// Prints a line: `text` and a newline.
    pub fn line(&self, text: impl fmt::Display) {
        self.print(format!("{text}\n"));
    }

    /// Prints `text`, which should be whole lines: what others print comes before or after it, not between.
    ///
    /// A reader who has gone, or a full disk, is no error: what cannot be written is dropped.
    pub fn print(&self, text: impl Into<Vec<u8>>) {
        let text = Text { to: Arc::clone(&self.to), bytes: text.into() };
        if text.bytes.is_empty() {
            return;
        }
        if let Err(text) = self.queue.put(text) {
            // The system has no thread left: better late than lost.
            write_pieces(text.to.as_fd(), &text.bytes, |_| ()).unwrap_or_default();
        }
    }

    /// Bytes that wait to be written, nothing else being printed meanwhile: 0 when the reader keeps up.
    pub fn pending(&self) -> usize {
        let state = self.queue.lock();
        state.bytes + usize::from(state.writing)
    }

    /// Waits until all that was printed is written, as long as the reader goes on taking some of it. Gives up, and returns false, when he has
    /// taken nothing for `drain_timeout`; what is left may still be written later, if the program goes on.
    pub fn finish(&self, drain_timeout: Duration) -> bool {
        self.finish_unless(drain_timeout, &mut || false)
    }

    /// As [`finish`](Printer::finish), and gives up at once when `stop` says so.
    pub(crate) fn finish_unless(&self, drain_timeout: Duration, stop: &mut dyn FnMut() -> bool) -> bool {
        let mut state = self.queue.lock();
        let mut taken = state.taken;
        let mut quiet = Duration::ZERO;
        while state.writing || !state.waiting.is_empty() {
            if state.given_up || quiet >= drain_timeout || stop() {
                state.given_up = true;
                return false;
            }
            let look = Instant::now();
            let wait = TICK.min(drain_timeout - quiet);
            state = self.queue.taken.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
            // Time in which this process was stopped does not count: the reader was perhaps stopped with it.
            quiet += look.elapsed().min(2 * TICK);
            if state.taken != taken {
                taken = state.taken;
                quiet = Duration::ZERO;
            }
        }
        true
    }
}

impl fmt::Debug for Printer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Printer").field("to", &self.to.as_fd()).field("pending", &self.pending()).finish()
    }
}

struct Text {
    to: Target,
    bytes: Vec<u8>,
}

impl Text {
    fn size(&self) -> usize {
        self.bytes.len() + OVERHEAD
    }

    fn lines(&self) -> u64 {
        self.bytes.iter().filter(|byte| **byte == b'\n').count() as u64
    }
}

struct Queue {
    capacity: usize,
    state: Mutex<State>,
    /// There is something to write.
    filled: Condvar,
    /// Something was written.
    taken: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Text>,
    /// Size of all that waits.
    bytes: usize,
    /// Whether the writer has something in its hands.
    writing: bool,
    /// Lines that were dropped since the last that was written, and why.
    left_out: u64,
    why: String,
    /// Bytes written so far.
    taken: u64,
    /// The reader is gone for good.
    gone: bool,
    /// A wait for the reader was given up, and the queue has not been empty since.
    given_up: bool,
    has_writer: bool,
}

impl State {
    fn leave_out(&mut self, lines: u64, why: &str) {
        self.left_out += lines;
        if self.why != why {
            self.why = why.to_string();
        }
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives `text` back where no thread can be started to write it.
    fn put(self: &Arc<Self>, text: Text) -> Result<(), Text> {
        let mut state = self.lock();
        if state.gone {
            return Ok(());
        }
        if !state.has_writer {
            let queue = Arc::clone(self);
            let writer = thread::Builder::new().name("comm-printer".into()).spawn(move || queue.write());
            if writer.is_err() {
                return Err(text);
            }
            state.has_writer = true;
        }
        state.bytes += text.size();
        state.waiting.push_back(text);
        while state.bytes > self.capacity && state.waiting.len() > 1 {
            let Some(oldest) = state.waiting.pop_front() else { break };
            state.bytes -= oldest.size();
            state.leave_out(oldest.lines(), "its reader was too slow");
        }
        drop(state);
        self.filled.notify_one();
        Ok(())
    }

    /// Writes what comes, for ever.
    fn write(&self) {
        loop {
            let (to, bytes) = self.next();
            let written = write_pieces(to.as_fd(), &bytes, |count| {
                self.lock().taken += count as u64;
                self.taken.notify_all();
            });
            if let Err((left, error)) = written {
                let mut state = self.lock();
                if error.kind() == io::ErrorKind::BrokenPipe {
                    state.gone = true;
                    state.waiting.clear();
                    state.bytes = 0;
                } else {
                    let lines = left.iter().filter(|byte| **byte == b'\n').count() as u64;
                    state.leave_out(lines, &error.to_string());
                }
            }
        }
    }

    /// The next whole texts that are written together.
    fn next(&self) -> (Target, Vec<u8>) {
        let mut state = self.lock();
        loop {
            if let Some(Text { to, bytes: first }) = state.waiting.pop_front() {
                state.bytes -= first.len() + OVERHEAD;
                let mut bytes = match state.left_out {
                    0 => first,
                    1 => [format!("1 line left out: {}\n", state.why).into_bytes(), first].concat(),
                    lines => [format!("{lines} lines left out: {}\n", state.why).into_bytes(), first].concat(),
                };
                state.left_out = 0;
                let fits =
                    |text: &Text, so_far: usize| Arc::ptr_eq(&text.to, &to) && so_far + text.bytes.len() <= PIECE;
                while let Some(text) = state.waiting.pop_front_if(|text| fits(text, bytes.len())) {
                    state.bytes -= text.size();
                    bytes.extend_from_slice(&text.bytes);
                }
                state.writing = true;
                return (to, bytes);
            }
            state.writing = false;
            state.given_up = false;
            self.taken.notify_all();
            state = self.filled.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Writes all bytes, and says of each write how many it took. The bytes that are left, where it fails.
fn write_pieces<'a>(
    to: BorrowedFd<'_>,
    mut bytes: &'a [u8],
    mut taken: impl FnMut(usize),
) -> Result<(), (&'a [u8], io::Error)> {
    while !bytes.is_empty() {
        match rustix::io::write(to, &bytes[..bytes.len().min(PIECE)]) {
            Ok(count) => {
                taken(count);
                bytes = &bytes[count..];
            }
            Err(Errno::INTR) => {}
            // Another process that shares this file has made it non-blocking.
            Err(Errno::AGAIN) => {
                sys::wait_until_writable(to, Duration::from_secs(1)).map_err(|error| (bytes, error))?;
            }
            Err(error) => return Err((bytes, error.into())),
        }
    }
    Ok(())
}

/// Whether both are one file, pipe or terminal.
fn same_file(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> bool {
    let identity = |fd: BorrowedFd<'_>| {
        let metadata = File::from(fd.try_clone_to_owned().ok()?).metadata().ok()?;
        Some((metadata.dev(), metadata.ino()))
    };
    identity(one).is_some_and(|one| Some(one) == identity(other))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, PipeReader, Read};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn pipe(capacity: usize) -> (Printer, PipeReader) {
        let (reader, writer) = io::pipe().unwrap();
        (Printer::with_capacity(writer, capacity), reader)
    }

    /// Waits until the writer is stuck in a full pipe: what waits does not change any more.
    fn wait_until_stuck(printer: &Printer) {
        let look = || Some(printer.queue.lock()).filter(|state| state.writing).map(|state| state.taken);
        let mut before = None;
        loop {
            let now = look();
            if now.is_some_and(|taken| taken > 0) && now == before {
                break;
            }
            before = now;
            thread::sleep(Duration::from_millis(50));
        }
    }

    #[test]
    fn who_prints_never_waits_and_what_was_dropped_is_said_in_its_place() {
        let (printer, reader) = pipe(100 << 10);
        // Ten times what pipe and queue hold: were this to wait for the reader, it would never end.
        let count = 20_000;
        for number in 0..count {
            printer.line(format_args!("line {number} {}", "x".repeat(90)));
        }
        assert!(printer.pending() <= 101 << 10, "{}", printer.pending());
        let (mut next, mut left_out) = (0, 0);
        for line in BufReader::new(reader).lines() {
            let line = line.unwrap();
            if let Some(gap) = line.strip_suffix(" lines left out: its reader was too slow") {
                // Where the writer gets little time, some lines come out between two gaps.
                let gap: usize = gap.parse().unwrap();
                left_out += gap;
                next += gap;
                continue;
            }
            assert_eq!(line, format!("line {next} {}", "x".repeat(90)));
            next += 1;
            if next == count {
                break;
            }
        }
        assert!(left_out > 10_000, "{left_out}");
        assert!(printer.finish(LONG));
    }

    #[test]
    fn the_end_waits_for_a_slow_reader() {
        let (printer, mut reader) = pipe(CAPACITY);
        printer.print([&[b'x'; 300_000][..], b"\n"].concat());
        // Its pauses are shorter than our limit, but all of it takes longer.
        let slow = thread::spawn(move || {
            let (mut got, mut piece) = (0, [0; 4096]);
            while got < 300_001 {
                thread::sleep(Duration::from_millis(20));
                got += reader.read(&mut piece).unwrap();
            }
        });
        let start = Instant::now();
        assert!(printer.finish(Duration::from_millis(800)), "given up after {:?}", start.elapsed());
        assert!(start.elapsed() > Duration::from_millis(800), "{:?}", start.elapsed());
        slow.join().unwrap();
    }

    #[test]
    fn the_end_does_not_wait_for_a_reader_that_takes_nothing() {
        let (printer, mut reader) = pipe(CAPACITY);
        printer.print([&[b'x'; 300_000][..], b"\n"].concat());
        wait_until_stuck(&printer);
        let start = Instant::now();
        assert!(!printer.finish(Duration::from_millis(200)), "reader was too slow");
        assert!(start.elapsed() >= Duration::from_millis(200));
        assert!(!printer.finish(LONG));
        assert!(start.elapsed() < LONG / 2, "given up once and for all");
        // It comes back after all.
        let mut all = vec![0; 300_001];
        reader.read_exact(&mut all).unwrap();
        while printer.pending() > 0 {
            thread::sleep(Duration::from_millis(1));
        }
        printer.line("more");
        assert!(printer.finish(LONG));
    }

    #[test]
    fn a_signal_ends_the_wait() {
        let (printer, _reader) = pipe(CAPACITY);
        printer.print(vec![b'x'; 300_000]);
        let start = Instant::now();
        let mut looks = 0;
        assert!(!printer.finish_unless(LONG, &mut || {
            looks += 1;
            looks == 2
        }));
        assert!(start.elapsed() < LONG / 2);
    }

    #[test]
    fn a_reader_that_has_gone_and_a_full_disk_are_no_trouble() {
        let (printer, reader) = pipe(CAPACITY);
        drop(reader);
        (0..1_000).for_each(|_| printer.print([b'\n'; 1000]));
        assert!(printer.finish(LONG));
        let printer = Printer::new(File::options().write(true).open("/dev/full").unwrap());
        (0..1_000).for_each(|_| printer.print([b'\n'; 1000]));
        assert!(printer.finish(LONG));
        assert_eq!(printer.pending(), 0);
    }

    #[test]
    fn what_a_full_disk_has_swallowed_is_said() {
        let (printer, reader) = pipe(CAPACITY);
        printer.to(File::options().write(true).open("/dev/full").unwrap()).print("one\ntwo\n");
        printer.line("three");
        let lines: Vec<String> = BufReader::new(reader).lines().take(2).map(Result::unwrap).collect();
        assert_eq!(lines, ["2 lines left out: No space left on device (os error 28)", "three"]);
    }

    #[test]
    fn a_pipe_that_does_not_block_loses_nothing() {
        let (mut reader, writer) = std::os::unix::net::UnixStream::pair().unwrap();
        writer.set_nonblocking(true).unwrap();
        let printer = Printer::new(writer);
        let count = 2_000_000;
        printer.print(vec![b'x'; count]);
        let mut got = vec![0; count];
        reader.read_exact(&mut got).unwrap();
        assert!(printer.finish(LONG));
    }

    #[test]
    fn one_file_is_known_under_two_numbers() {
        let (reader, writer) = io::pipe().unwrap();
        let again = writer.try_clone().unwrap();
        assert!(same_file(writer.as_fd(), again.as_fd()));
        assert!(!same_file(writer.as_fd(), File::open("/dev/null").unwrap().as_fd()));
        drop(reader);
    }
}
