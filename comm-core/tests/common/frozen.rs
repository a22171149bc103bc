//! Jobs whose ranks are processes that are stopped for a while, for every transport that connects processes.
//!
//! A test program that uses this has an ignored test `rank_of_a_job` that calls [`serve`]: it is started once a rank.
#![allow(dead_code, reason = "each test program uses a part")]
#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests too")]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use comm_core::control::{TcpControl, TcpOptions};
use comm_core::job::{Address, Job, Secret};
use comm_core::{Buffer, Call, Communicator, Control, Deadline, Op, ReduceOp};

/// How long anything may take that must happen.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Before what a rank says to the test.
const MARK: &str = "rank says: ";

/// What the ranks of a job go by.
#[derive(Clone, Copy)]
pub(crate) struct Terms {
    pub(crate) ranks: usize,
    pub(crate) liveness: Duration,
    /// Of each operation.
    pub(crate) timeout: Duration,
}

/// A running job.
pub(crate) struct Frozen {
    ranks: Vec<Rank>,
    /// Where they meet, and look whether the job is to end.
    folder: PathBuf,
}

struct Rank {
    process: Child,
    said: Arc<(Mutex<Vec<String>>, Condvar)>,
}

impl Frozen {
    /// Starts the ranks and waits until all have run some operations. `transport` is handed on to them.
    pub(crate) fn start(terms: Terms, transport: &str) -> Self {
        static JOBS: AtomicUsize = AtomicUsize::new(0);
        let number = JOBS.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("comm-frozen-{}-{number}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let ranks = (0..terms.ranks).map(|rank| start(rank, terms, transport, &folder)).collect();
        let job = Frozen { ranks, folder };
        job.all_go_on();
        job
    }

    pub(crate) fn ranks(&self) -> usize {
        self.ranks.len()
    }

    /// Sends `signal`, as `kill` calls it, to these ranks at once.
    pub(crate) fn signal(&self, signal: &str, ranks: &[usize]) {
        let ids = ranks.iter().map(|rank| self.ranks[*rank].process.id().to_string());
        assert!(Command::new("kill").arg(signal).args(ids).status().unwrap().success());
    }

    /// Waits until every rank has got on.
    pub(crate) fn all_go_on(&self) {
        let steps = |rank: &Rank| rank.said.0.lock().unwrap().iter().filter(|text| text.starts_with("step")).count();
        let before: Vec<usize> = self.ranks.iter().map(steps).collect();
        for (rank, before) in self.ranks.iter().zip(before) {
            rank.wait(|said| said.iter().filter(|text| text.starts_with("step")).nth(before + 2).cloned());
        }
    }

    /// What this rank's first operation failed with that did.
    pub(crate) fn failure(&self, rank: usize) -> String {
        self.ranks[rank].wait(|said| said.iter().find_map(|text| Some(text.strip_prefix("failed: ")?.to_string())))
    }

    /// Ends the job in an orderly way.
    pub(crate) fn end(self) {
        std::fs::write(self.folder.join("end"), "").unwrap();
        for rank in &self.ranks {
            rank.wait(|said| said.iter().find(|text| *text == "done").cloned());
        }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.ranks.clear();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Rank {
    fn wait(&self, find: impl Fn(&[String]) -> Option<String>) -> String {
        let (said, changed) = &*self.said;
        let began = Instant::now();
        let mut said = said.lock().unwrap();
        loop {
            if let Some(found) = find(&said) {
                return found;
            }
            let is_late = began.elapsed() > TIMEOUT || said.last().is_some_and(|text| text == "the end");
            assert!(!is_late, "a rank did not say what it should: {said:?}");
            said = changed.wait_timeout(said, Duration::from_millis(100)).unwrap().0;
        }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // One that is stopped is killed as well.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn start(rank: usize, terms: Terms, transport: &str, folder: &Path) -> Rank {
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "rank_of_a_job", "--nocapture"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let Terms { ranks, liveness, timeout } = terms;
    let (liveness, timeout, folder) = (liveness.as_millis(), timeout.as_millis(), folder.to_str().unwrap());
    writeln!(process.stdin.take().unwrap(), "{rank} {ranks} {liveness} {timeout} {transport} {folder}").unwrap();
    let said: Arc<(Mutex<Vec<String>>, Condvar)> = Arc::default();
    let (output, heard) = (BufReader::new(process.stdout.take().unwrap()), said.clone());
    thread::spawn(move || {
        let say = |text: &str| {
            heard.0.lock().unwrap().push(text.into());
            heard.1.notify_all();
        };
        for line in output.lines().map_while(Result::ok) {
            // The harness may have begun the line.
            if let Some((_, text)) = line.split_once(MARK) {
                say(text);
            }
        }
        say("the end");
    });
    Rank { process, said }
}

/// One rank, as its standard input says: runs small operations until the job is to end, or fails. `connect` gets the name of a
/// transport.
pub(crate) fn serve(connect: impl Fn(&str, Arc<dyn Control>) -> Arc<dyn Communicator>) {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let words: Vec<&str> = line.trim_end().splitn(6, ' ').collect();
    // Whoever runs ignored tests by hand.
    let [rank, ranks, liveness, timeout, transport, folder] = words[..] else { return };
    let number = |word: &str| word.parse::<u64>().unwrap();
    let folder = PathBuf::from(folder);
    let secret = Secret::new("a secret for tests only").unwrap();
    let job = Job::new(number(rank) as usize, number(ranks) as usize, Address::File(folder.join("meeting")), secret);
    let options = TcpOptions {
        heartbeat: Duration::from_millis(100),
        liveness: Duration::from_millis(number(liveness)),
        ..TcpOptions::default()
    };
    let control = TcpControl::connect_with(&job.unwrap(), &[], options, Deadline::after(TIMEOUT)).unwrap();
    let communicator = connect(transport, control.clone());
    let timeout = Duration::from_millis(number(timeout));
    for step in 0.. {
        let is_end = communicator.rank() == 0 && folder.join("end").exists();
        let flag = Buffer::from_vec(vec![f32::from(u8::from(is_end))]);
        let call = Call::blocking(Op::AllReduce(ReduceOp::Max), flag).with_timeout(timeout);
        match communicator.start(call).wait() {
            Ok(completed) => {
                if completed.buffer.into_vec::<f32>().unwrap() == [1.0] {
                    break;
                }
                if step % 20 == 0 {
                    println!("{MARK}step {step}");
                }
            }
            Err(failed) => {
                println!("{MARK}failed: {}", failed.error);
                let settled = control.settled_failure().unwrap();
                assert_eq!(settled.to_string(), failed.error.to_string());
                return;
            }
        }
        thread::sleep(Duration::from_millis(2));
    }
    communicator.finish(TIMEOUT).unwrap();
    println!("{MARK}done");
}
