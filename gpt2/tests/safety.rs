//! Precautions of a training job: compared calls, the search for NaN, and a report about who is late.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::io::Read;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::{lines, ranks_of, start, wait, wait_for};

const SOON: Duration = Duration::from_secs(60);

fn text(folder: &tempfile::TempDir) -> PathBuf {
    let data = folder.path().join("text.txt");
    fs::write(&data, "Whoever trains wants to know who is late. ".repeat(300)).unwrap();
    data
}

#[test]
fn compared_calls_change_no_weight_of_any_strategy() {
    for strategy in ["ps", "sharded-ps", "ring", "ddp", "zero1", "zero2", "fsdp", "hierarchical"] {
        let folder = tempfile::tempdir().unwrap();
        let data = text(&folder);
        let hashes: Vec<String> = [&[][..], &["--checked", "--check-finite"]]
            .into_iter()
            .map(|more| {
                let out = if more.is_empty() { "plain" } else { "compared" };
                let more = [more, &["--out", out]].concat();
                let mut job = start(strategy, "tcp-raw", &data, folder.path(), 3, &more);
                let status = wait(&mut job, SOON);
                let mut said = String::new();
                job.stdout.take().unwrap().read_to_string(&mut said).unwrap();
                assert_eq!(status, Some(Some(0)), "{strategy} {more:?}: {said}");
                said.lines().find_map(|line| line.split_once("weights: sha256 ")).unwrap().1.to_string()
            })
            .collect();
        assert_eq!(hashes[0], hashes[1], "{strategy}");
    }
}

#[test]
fn a_gradient_that_is_no_number_ends_the_job_with_rank_bucket_and_index() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(&folder);
    // So large that the second step has no finite loss. Buckets are searched side by side: any of them may be the first found.
    let more = ["--lr", "1e38", "--warmup", "0", "--clip", "0", "--check-finite", "--bucket-bytes", "1"];
    let mut job = start("ddp", "tcp-raw", &data, folder.path(), 20, &more);
    let status = wait(&mut job, SOON);
    let mut said = String::new();
    job.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(status, Some(Some(1)), "{said}");
    let errors: Vec<&str> = said
        .lines()
        .filter_map(|line| line.strip_prefix("[rank ")?.split_once("error: rank "))
        .map(|(_, what)| what)
        .collect();
    assert_eq!(errors.len(), 3, "{said}");
    assert!(errors.iter().all(|error| *error == errors[0]), "{said}");
    for part in [" contributed ", " to all-reduce mean of ", "[gradients, bucket ", ", at index "] {
        assert!(errors[0].contains(part), "{part:?} in {}", errors[0]);
    }
}

#[test]
fn a_rank_that_is_stopped_for_a_while_is_named_as_late_and_then_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(&folder);
    let mut job = start("ring", "tcp", &data, folder.path(), 1_000_000, &["--stall-after", "0.5", "--liveness", "600"]);
    let lines = lines(&mut job);
    wait_for(&lines, "] step ", SOON).unwrap();
    let victim = ranks_of(job.id())[1].to_string();
    let send = |signal: &str| assert!(Command::new("kill").args([signal, &victim]).status().unwrap().success());
    send("-STOP");
    let report = wait_for(&lines, "stall: rank ", SOON);
    let who = wait_for(&lines, "rank 1: did not answer", SOON);
    send("-CONT");
    assert!(report.is_some() && who.is_some());
    // It goes on as if nothing had been.
    wait_for(&lines, "] step ", SOON).unwrap();
    assert!(Command::new("kill").args(["-INT", &job.id().to_string()]).status().unwrap().success());
    assert_eq!(wait(&mut job, SOON), Some(Some(128 + 2)));
}

#[test]
fn a_job_that_is_stopped_as_a_whole_goes_on_where_it_was() {
    // As in a laptop that sleeps, a container that is frozen: for longer than any of its deadlines.
    let folder = tempfile::tempdir().unwrap();
    let data = text(&folder);
    let terms = ["--liveness", "5", "--timeout", "6", "--stall-after", "6"];
    let mut job = start("ddp", "quic", &data, folder.path(), 1_000_000, &terms);
    let lines = lines(&mut job);
    wait_for(&lines, "] step ", SOON).unwrap();
    let all: Vec<String> = ranks_of(job.id()).into_iter().chain([job.id()]).map(|id| id.to_string()).collect();
    assert_eq!(all.len(), 4);
    let send = |signal: &str| assert!(Command::new("kill").arg(signal).args(&all).status().unwrap().success());
    send("-STOP");
    assert!(job.try_wait().unwrap().is_none(), "it ended before it was stopped");
    std::thread::sleep(Duration::from_secs(8));
    let before: Vec<String> = lines.try_iter().map(|(_, line)| line).collect();
    let going_on = Instant::now();
    send("-CONT");
    // For as long as it takes to notice that somebody is late.
    let mut said = before;
    let mut steps = 0;
    while let Ok((at, line)) = lines.recv_timeout(SOON) {
        steps += usize::from(line.contains("] step "));
        said.push(line);
        if at > going_on + Duration::from_secs(7) {
            break;
        }
    }
    let last = said.len().saturating_sub(20);
    assert!(job.try_wait().unwrap().is_none() && steps > 0, "{:#?}", &said[last..]);
    assert!(Command::new("kill").args(["-INT", &job.id().to_string()]).status().unwrap().success());
    let status = wait(&mut job, SOON);
    said.extend(lines.iter().map(|(_, line)| line));
    let bad: Vec<&String> = said.iter().filter(|line| !line.contains("] step ")).collect();
    assert_eq!(status, Some(Some(128 + 2)), "{bad:#?}");
    assert!(!said.iter().any(|line| line.contains("stall: ")), "{bad:#?}");
}
