//! Training with all ranks as threads of this process, over communicators with a fault.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use burn::tensor::Device;
use comm_core::Error;
use gpt2::corpus::Corpus;
use gpt2::trainer::{Session, Summary, TrainConfig, TrainError, train};
use isocomm::TransportOptions;

use super::fault::{Fault, TamperedCommunicator};

/// Longest time of an operation; a run takes seconds.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Trains on `ranks` threads; the summary is equal on all of them, or the trainer says that it is not.
pub(super) fn train_all(config: &TrainConfig, corpus: &Corpus, ranks: usize, fault: Fault) -> Result<Summary, String> {
    let options = TransportOptions { timeout: TIMEOUT, ..TransportOptions::default() };
    let sessions = Session::threads(ranks, &options).map_err(|error| error.to_string())?;
    let sessions = sessions
        .into_iter()
        .map(|session| Session { comm: Arc::new(TamperedCommunicator::new(session.comm, fault)), ..session });
    let outcomes: Vec<Result<Summary, TrainError>> = thread::scope(|scope| {
        let threads: Vec<_> = sessions
            .map(|session| scope.spawn(move || train(config, corpus, &session, &Device::flex(), None, &mut ())))
            .collect();
        let panicked = || Err(Error::Internal("a rank's thread panicked".into()).into());
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| panicked())).collect()
    });
    let mut first = None;
    for outcome in outcomes {
        match outcome {
            Ok(summary) => _ = first.get_or_insert(Ok(summary)),
            // Another rank's own error says more.
            Err(TrainError::Comm(error @ (Error::PeerLost { .. } | Error::Aborted { .. }))) => {
                first = Some(Err(error.to_string()));
            }
            Err(error) => return Err(error.to_string()),
        }
    }
    first.unwrap_or_else(|| Err("a job needs at least one rank".into()))
}
