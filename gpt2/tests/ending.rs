//! The end of a run that does not end well: what is known by then is not lost.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use burn::tensor::Device;
use comm_core::{Communicator, Control, Error};
use gpt2::checkpoint::{Checkpoint, weights_hash};
use gpt2::strategy::StrategyKind;
use gpt2::trainer::{Observer, Session, StepReport, Summary, TrainConfig, TrainError, train};
use isocomm::TransportOptions;

use crate::local::{corpus, single, with};

/// How long one rank waits for the other.
const SOON: Duration = Duration::from_secs(60);

/// What a rank does after its last step, before the others hear from it.
enum Then {
    /// Tells that it is there.
    Tell(Sender<()>),
    /// Waits until it is told, and gives up on the communicator: the others hear of it when they take leave, or before.
    GiveUp(Receiver<()>, Arc<dyn Communicator>),
    /// Waits until it is told, says why on the control plane, and is gone: the others get no report of it.
    Fail(Receiver<()>, Arc<dyn Control>),
    Nothing,
}

struct Watch {
    steps: u64,
    then: Then,
    summary: Option<Summary>,
}

impl Observer for Watch {
    fn step(&mut self, report: &StepReport) {
        if report.step < self.steps {
            return;
        }
        match &self.then {
            Then::Tell(other) => other.send(()).unwrap(),
            Then::GiveUp(other, comm) => {
                other.recv_timeout(SOON).unwrap();
                comm.abort("had enough");
            }
            Then::Fail(other, control) => {
                other.recv_timeout(SOON).unwrap();
                control.poison(&Error::invalid("had enough"));
                resume_unwind(Box::new(()));
            }
            Then::Nothing => {}
        }
    }

    fn ended(&mut self, summary: &Summary) {
        assert!(self.summary.replace(summary.clone()).is_none(), "told twice");
    }
}

/// Both ranks' results, and what their observers were told.
type Outcome = (Result<Summary, TrainError>, Option<Summary>);

/// How rank 1 ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ends {
    Well,
    GivesUp,
    Fails,
}

fn run(config: &TrainConfig, checkpoint: Option<PathBuf>, how: Ends) -> Vec<Outcome> {
    let corpus = corpus(20_000);
    let options = TransportOptions { timeout: SOON, ..TransportOptions::default() };
    let (sender, receiver) = channel();
    let ends = Mutex::new((Some(sender), Some(receiver)));
    thread::scope(|scope| {
        let threads: Vec<_> = Session::threads(2, &options)
            .unwrap()
            .into_iter()
            .enumerate()
            .map(|(rank, session)| {
                let (corpus, checkpoint) = (&corpus, checkpoint.clone().filter(|_| rank == 0));
                let mut ends = ends.lock().unwrap();
                let then = match (rank, how) {
                    (_, Ends::Well) => Then::Nothing,
                    (0, _) => Then::Tell(ends.0.take().unwrap()),
                    (_, Ends::GivesUp) => Then::GiveUp(ends.1.take().unwrap(), session.comm.clone()),
                    (_, Ends::Fails) => Then::Fail(ends.1.take().unwrap(), session.control.clone()),
                };
                let mut watch = Watch { steps: config.steps, then, summary: None };
                scope.spawn(move || {
                    let result = train(config, corpus, &session, &Device::flex(), checkpoint, &mut watch);
                    (result, watch.summary)
                })
            })
            .collect();
        let gone = || (Err(Error::invalid("had enough").into()), None);
        threads.into_iter().map(|rank| rank.join().unwrap_or_else(|_| gone())).collect()
    })
}

fn config() -> TrainConfig {
    with(&single(4), (StrategyKind::Ddp, false), 2)
}

#[test]
fn a_run_that_ends_well_tells_what_it_returns() {
    for (result, told) in run(&config(), None, Ends::Well) {
        let (result, told) = (result.unwrap(), told.unwrap());
        assert_eq!(serde_json::to_value(&result).unwrap(), serde_json::to_value(&told).unwrap());
    }
}

#[test]
fn where_a_rank_is_lost_after_the_last_step_the_summary_and_the_weights_are_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let undisturbed = run(&config(), None, Ends::Well).swap_remove(0).0.unwrap();
    for how in [Ends::GivesUp, Ends::Fails] {
        let outcomes = run(&config(), Some(path.clone()), how);
        for (result, _) in &outcomes {
            let error = result.as_ref().map(drop).unwrap_err().to_string();
            assert!(error.contains("had enough"), "{how:?}: {error}");
        }
        let summary = outcomes[0].1.as_ref().unwrap();
        assert_eq!((&summary.losses, &summary.weights_hash), (&undisturbed.losses, &undisturbed.weights_hash));
        let heard_of: Vec<usize> = summary.ranks.iter().map(|rank| rank.rank).collect();
        // One that gives up still reports, and whether that or the end of the communicator is heard of first is chance.
        assert!(heard_of == [0] || (how == Ends::GivesUp && heard_of == [0, 1]), "{how:?}: {heard_of:?}");
        assert_eq!(summary.checkpoint, Some(path.clone()));
        let saved = Checkpoint::load(&path).unwrap();
        assert_eq!(saved.step, 4);
        assert_eq!(weights_hash(&saved.model(&Device::flex()).unwrap()).unwrap(), undisturbed.weights_hash);
        fs::remove_file(&path).unwrap();
    }
}

#[test]
fn where_the_weights_cannot_be_saved_all_ranks_fail_and_the_summary_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let nowhere = folder.path().join("nowhere/model.safetensors");
    for strategy in [StrategyKind::Ddp, StrategyKind::Fsdp, StrategyKind::Ps] {
        let config = with(&single(4), (strategy, false), 2);
        let [(first, told), (other, _)] =
            run(&config, Some(nowhere.clone()), Ends::Well).try_into().map_err(|_| ()).unwrap();
        let error = first.map(drop).unwrap_err();
        assert!(matches!(error, TrainError::Checkpoint(_)), "{strategy}: {error}");
        let echo = other.map(drop).unwrap_err().to_string();
        assert!(echo.contains("rank 0") && echo.contains("nowhere/model.safetensors"), "{strategy}: {echo}");
        let summary = told.unwrap();
        assert_eq!((summary.steps, summary.ranks.len(), summary.checkpoint), (4, 2, None), "{strategy}");
    }
}
