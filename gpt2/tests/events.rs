//! Event files, read by TensorBoard itself.
//!
//!     ISOCOMM_TENSORBOARD_PYTHON=python3 cargo test -p gpt2 --test all events
//!
//! names a Python that has the package `tensorboard`; without it, what needs it is skipped and says so.

#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests too")]

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use gpt2::events::EventFile;

/// A Python with TensorBoard. One that was named and has none is a failure, so that the check is not lost unseen.
fn python() -> Option<OsString> {
    let python = std::env::var_os("ISOCOMM_TENSORBOARD_PYTHON").filter(|python| !python.is_empty());
    if python.is_none() {
        eprintln!("skipped: ISOCOMM_TENSORBOARD_PYTHON names no Python with tensorboard");
    }
    python
}

/// The points of every tag, as TensorBoard reads them: step, time, value.
fn read(python: &OsString, folder: &Path) -> BTreeMap<String, Vec<(u64, f64, f64)>> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("reference/read_events.py");
    let output = Command::new(python).arg(script).arg(folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut points = BTreeMap::<String, Vec<_>>::new();
    for line in String::from_utf8(output.stdout).unwrap().lines() {
        let [tag, step, time, value] = line.split('\t').collect::<Vec<_>>().try_into().unwrap();
        let point = (step.parse().unwrap(), time.parse().unwrap(), value.parse().unwrap());
        points.entry(tag.into()).or_default().push(point);
    }
    points
}

#[test]
fn tensorboard_reads_every_point() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    let start = now();
    // More than the buffer of the file and TensorBoard's default sample hold.
    const STEPS: u64 = 20_000;
    let value = |step: u64| 10.0 / (step + 1) as f64;
    let mut file = EventFile::create(folder.path()).unwrap();
    for step in 0..STEPS {
        file.scalar("train/loss", step, value(step)).unwrap();
        if step % 1000 == 0 {
            file.scalar("memory/parameters", step, 0.0).unwrap();
        }
    }
    file.scalar("edge", 1 << 40, f64::INFINITY).unwrap();
    file.flush().unwrap();

    let points = read(&python, folder.path());
    assert_eq!(points.keys().collect::<Vec<_>>(), ["edge", "memory/parameters", "train/loss"]);
    assert_eq!(points["train/loss"].len() as u64, STEPS);
    for (step, point) in (0..).zip(&points["train/loss"]) {
        assert_eq!((point.0, point.2), (step, f64::from(value(step) as f32)));
        assert!(point.1 >= start && point.1 <= now(), "{point:?}");
    }
    assert_eq!(points["memory/parameters"].len(), 20);
    assert!(points["memory/parameters"].iter().all(|point| point.2 == 0.0));
    assert_eq!((points["edge"][0].0, points["edge"][0].2), (1 << 40, f64::INFINITY));
}

#[test]
fn tensorboard_joins_the_files_of_a_folder_and_bears_an_end_cut_off() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut first = EventFile::create(folder.path()).unwrap();
    first.scalar("loss", 1, 4.0).unwrap();
    drop(first);
    let mut second = EventFile::create(folder.path()).unwrap();
    second.scalar("loss", 2, 3.0).unwrap();
    second.scalar("loss", 3, 2.0).unwrap();
    let path = second.path().to_owned();
    drop(second);
    // As after a crash in the middle of a write.
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 3]).unwrap();
    let points: Vec<_> = read(&python, folder.path())["loss"].iter().map(|point| (point.0, point.2)).collect();
    assert_eq!(points, [(1, 4.0), (2, 3.0)]);
}
