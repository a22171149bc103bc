//! The whole state of a run, written by all ranks together, and read by those of a run that goes on.

use std::borrow::Cow;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use comm_core::control::ControlExt;
use comm_core::process::StopRequest;
use comm_core::{CommunicatorExt, Deadline, ReduceOp, shard_range};
use serde::{Deserialize, Serialize};

use super::local::Local;
use super::rank::Trainer;
use super::{TrainConfig, TrainError};
use crate::checkpoint::sharded::{Best, PartFile, PartWriter, Piece, Reader, Saved, SavedError, State, Store};
use crate::checkpoint::{InitialWeights, StoredWeights};
use crate::corpus::Corpus;
use crate::devices;
use crate::memory;

/// What a run saves and where, from what it goes on, and what asks it to leave.
#[derive(Clone, Debug, Default)]
pub struct Keep {
    /// Where rank 0 saves the weights: at each validation and at the end.
    pub model: Option<PathBuf>,
    /// Where rank 0 keeps those of the best validation so far: another name of what was saved at `model` then.
    pub best: Option<PathBuf>,
    /// Where all ranks save the whole state. The same on all ranks.
    pub checkpoints: Option<Checkpoints>,
    /// From what the run goes on. The same on all ranks.
    pub resume: Option<Arc<Saved>>,
    /// What asks the run to save its state and leave, where it has `checkpoints`. Signals do so from the first step on.
    pub stop: StopRequest,
    /// What has come of earlier attempts.
    pub restarts: Restarts,
}

/// Where and when the whole state is saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoints {
    /// Where: a folder that all ranks share.
    pub store: Store,
    /// After every so many steps; 0 for only when the run is asked to leave. Not after the last step, whose weights are the result.
    pub every: u64,
    /// How many are kept, at least 1.
    pub keep: usize,
}

/// Attempts that ended early before this one, for which a launcher has started the ranks again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restarts {
    /// Their number.
    pub count: u64,
    /// Steps that were done in them and had to be done again.
    pub steps_lost: u64,
}

/// A checkpoint that was written.
#[derive(Clone, Debug)]
pub struct SaveReport {
    /// After so many steps.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
    /// Bytes of all files.
    pub bytes: u64,
    /// How long it took, from the first rank that waited for the others to the end.
    pub ms: f64,
    /// The most memory that a process had allocated meanwhile beyond what it had before; `None` without the counting allocator.
    pub extra_bytes: Option<u64>,
    /// Why older ones are still there, if they are.
    pub not_removed: Option<String>,
}

/// What a rank tells the others of its part.
#[derive(Serialize, Deserialize)]
struct Part {
    file: Option<PartFile>,
    extra_bytes: Option<u64>,
}

impl Trainer<'_> {
    /// Saves the state after `step` steps; all ranks call it together, after a step in which they agree. Either all get a report, or all an
    /// error, and what was there before stays.
    ///
    /// # Errors
    /// [`TrainError::Saved`] where it could not be written; any other where the run cannot go on.
    pub(super) fn save_state(
        &mut self,
        checkpoints: &Checkpoints,
        corpus: &Corpus,
        step: u64,
    ) -> Result<SaveReport, TrainError> {
        self.apart(|trainer| {
            let (start, store) = (Instant::now(), &checkpoints.store);
            let is_first = trainer.session.comm.rank() == 0;
            let begun = if is_first { store.begin(step) } else { Ok(()) };
            trainer.all_told(store, step, "begun", begun)?;
            memory::reset_peaks();
            let before = memory::usage().map(|usage| usage.total.current);
            let written = trainer.write_part(store, step);
            let extra_bytes = memory::usage().zip(before).map(|(now, before)| now.total.peak.saturating_sub(before));
            let parts = trainer.all_told(store, step, "written", written.map(|file| Part { file, extra_bytes }));
            let ended = parts.and_then(|parts| {
                let extra_bytes = parts.iter().filter_map(|part| part.extra_bytes).max();
                let files: Vec<PartFile> = parts.into_iter().filter_map(|part| part.file).collect();
                let bytes = files.iter().map(|file| file.bytes).sum();
                let ended = if is_first {
                    trainer.state(corpus, step, files).and_then(|state| store.commit(&state))
                } else {
                    Ok(())
                };
                trainer.all_told(store, step, "ended", ended)?;
                Ok((bytes, extra_bytes))
            });
            if is_first && ended.is_err() {
                store.discard(step);
            }
            let (bytes, extra_bytes) = ended?;
            let removed = if is_first { store.keep_newest(checkpoints.keep.max(1)) } else { Ok(()) };
            let not_removed = removed.err().map(|error| error.to_string());
            let (path, ms) = (store.path(step), super::ms(start.elapsed()));
            Ok(SaveReport { step, path, bytes, ms, extra_bytes, not_removed })
        })
    }

    /// What each rank has come to, once all have; the same error on all where one has failed.
    fn all_told<T: Serialize + serde::de::DeserializeOwned>(
        &self,
        store: &Store,
        step: u64,
        what: &str,
        mine: Result<T, SavedError>,
    ) -> Result<Vec<T>, TrainError> {
        // A rank that writes much may take longer than an operation: a second for each 16 MiB of the whole state.
        let elements: usize = self.local.model.segments().iter().map(|info| info.len).sum();
        let writing = Duration::from_secs((elements as u64 * 12) >> 24);
        let deadline = Deadline::after(self.session.timeout.saturating_add(writing));
        let label = format!("checkpoint {what}");
        let told = self.session.control.gather(&label, &mine.map_err(|error| error.to_string()), deadline)?;
        let told = told.into_iter().enumerate().map(|(rank, told): (usize, Result<T, String>)| {
            told.map_err(|why| SavedError::NotWritten { path: store.path(step), rank, why })
        });
        Ok(told.collect::<Result<_, _>>()?)
    }

    /// Writes this rank's file, if it has anything to write: straight from where the values are.
    fn write_part(&self, store: &Store, step: u64) -> Result<Option<PartFile>, SavedError> {
        let rank = self.session.comm.rank();
        let steps = self.local.optimizer.steps();
        let ranges = ranges_to_write(&self.local.owned_by, rank);
        let ranges: Vec<(usize, Range<usize>)> =
            ranges.into_iter().enumerate().filter(|(_, range)| !range.is_empty()).collect();
        if ranges.is_empty() {
            return Ok(None);
        }
        let piece = |(segment, range): &(usize, Range<usize>)| Piece {
            segment: self.local.model.segments()[*segment].name.clone(),
            start: range.start,
            len: range.len(),
            optimizer_steps: steps[*segment],
        };
        let pieces: Vec<Piece> = ranges.iter().map(piece).collect();
        let (path, name) = store.part(step, rank);
        let failed = |source| SavedError::Io { path: path.clone(), what: "cannot write it (disk full?)", source };
        let mut file = PartWriter::create(&path, &pieces).map_err(failed)?;
        for (segment, range) in ranges {
            let first = self.local.owned_by[rank][segment].0;
            let own = range.start - first..range.end - first;
            let from_device = |error: TrainError| failed(std::io::Error::other(error.to_string()));
            file.values(&self.own_masters(segment).map_err(from_device)?[own.clone()]).map_err(failed)?;
            for means in self.local.optimizer.state(segment).map_err(from_device)? {
                file.values(&means[own.clone()]).map_err(failed)?;
            }
        }
        let (bytes, sha256) = file.finish().map_err(failed)?;
        Ok(Some(PartFile { name, bytes, sha256, pieces }))
    }

    fn state(&self, corpus: &Corpus, step: u64, files: Vec<PartFile>) -> Result<State, SavedError> {
        let json = |what: &'static str, value: serde_json::Result<serde_json::Value>| {
            value.map_err(|error| SavedError::Io {
                path: what.into(),
                what: "cannot be described",
                source: error.into(),
            })
        };
        let steps_per_epoch = self.local.batches.steps_per_epoch() as u64;
        Ok(State {
            step,
            epoch: step / steps_per_epoch + 1,
            step_of_epoch: step % steps_per_epoch,
            config: json("the configuration", serde_json::to_value(self.config))?,
            ranks: self.session.comm.world_size(),
            transport: self.session.properties.transport.name().to_owned(),
            device: Some(devices::kind(self.local.model.device()).to_owned()),
            text: corpus.describe(),
            text_sha256: corpus.hash_hex(),
            tokenizer: json("the tokenizer", serde_json::to_value(corpus.tokenizer()))?,
            scaler: self.local.scaler.state(),
            best: self.best,
            files,
        })
    }

    /// Whether all ranks leave now, since one was asked to: known from the step's scalars, or, where a strategy has no step in which all
    /// ranks look at the same, asked for once they agree.
    pub(super) fn leaves(&mut self) -> Result<bool, TrainError> {
        match self.local.leaving.take() {
            Some(leaving) => Ok(leaving),
            None if self.replicas_agree && self.keep.checkpoints.is_some() => {
                let asked = i64::from(self.keep.stop.is_asked());
                Ok(self.local.scalars.all_reduce_scalar(asked, ReduceOp::Max)? == 1)
            }
            None => Ok(false),
        }
    }

    /// A validation, if none before was as good.
    pub(super) fn if_best(&self, step: u64, loss: f64) -> Option<Best> {
        (loss.is_finite() && self.best.is_none_or(|best| loss < best.loss)).then_some(Best { step, loss })
    }
}

/// What each rank writes of each segment: ranks that own the same range of one share it evenly, so that every element is written once and
/// no rank writes much more than another.
fn ranges_to_write(owned_by: &[Vec<(usize, usize)>], rank: usize) -> Vec<Range<usize>> {
    let of_segment = |(segment, own): (usize, &(usize, usize))| {
        let (start, len) = *own;
        let same: Vec<usize> = (0..owned_by.len()).filter(|other| owned_by[*other][segment] == *own).collect();
        let place = same.iter().position(|other| *other == rank).unwrap_or(0);
        let part = shard_range(len, same.len().max(1), place);
        start + part.start..start + part.end
    };
    owned_by[rank].iter().enumerate().map(of_segment).collect()
}

/// Where the values of a run that begins come from.
pub(super) enum Start<'a> {
    /// The seed.
    Seed,
    /// The weights of another run or program; the optimizer begins anew.
    Weights(StoredWeights),
    /// A checkpoint of the whole state.
    Saved(&'a Saved, Reader<'a>),
}

impl<'a> Start<'a> {
    /// Of a run that is to go on from `saved`, if from any, and otherwise begins as its settings say.
    ///
    /// # Errors
    /// The weights to start from are not there, or not of the run's model.
    pub(super) fn of(saved: Option<&'a Saved>, config: &TrainConfig) -> Result<Self, TrainError> {
        Ok(match (saved, &config.initial) {
            (Some(saved), _) => Start::Saved(saved, Reader::new(saved)),
            (None, Some(initial)) => Start::Weights(weights(config, initial)?),
            (None, None) => Start::Seed,
        })
    }
}

/// The weights to start from, which are to be of the run's model.
fn weights(config: &TrainConfig, initial: &InitialWeights) -> Result<StoredWeights, TrainError> {
    let stored = StoredWeights::open(&initial.path)?.with_block_size(config.model.block_size)?;
    if *stored.config() != config.model {
        return Err(comm_core::Error::invalid(format!(
            "the weights in {} are of a model of another shape: {:?} instead of {:?}",
            initial.path.display(),
            stored.config(),
            config.model
        ))
        .into());
    }
    Ok(stored)
}

/// Gives a rank what is not sharded of a checkpoint.
///
/// # Errors
/// [`TrainError::Scaling`], and [`SavedError::Foreign`] where the step is at another place in the data than it was.
pub(super) fn restore_rest(local: &mut Local<'_>, saved: &Saved) -> Result<(), TrainError> {
    let state = saved.state();
    let restored = local.scaler.restore(&state.scaler);
    restored.map_err(|error| TrainError::Scaling { step: state.step, error })?;
    let steps_per_epoch = local.batches.steps_per_epoch() as u64;
    let place = (state.step / steps_per_epoch + 1, state.step % steps_per_epoch);
    if place != (state.epoch, state.step_of_epoch) || state.step > local.config.steps {
        let detail = format!(
            "its step {} is the {}th of epoch {} there, and the {}th of epoch {} of {} steps here",
            state.step, state.step_of_epoch, state.epoch, place.1, place.0, local.config.steps
        );
        return Err(SavedError::Foreign { path: saved.folder().into(), detail }.into());
    }
    Ok(())
}

/// Both moments of an optimizer, in host memory.
pub(super) type Means<'a> = [Cow<'a, [f32]>; 2];

/// What a run that was asked to leave ends with.
pub(super) fn stopped(report: &SaveReport) -> TrainError {
    TrainError::Stopped { step: report.step, path: report.path.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_written_once_whoever_owns_it() {
        // Of one segment of ten elements: replicas, one owner, shards, replicas of shards.
        for owned in [
            vec![(0, 10), (0, 10), (0, 10)],
            vec![(0, 10), (0, 0), (0, 0)],
            vec![(0, 4), (4, 3), (7, 3)],
            vec![(0, 5), (5, 5), (0, 5), (5, 5)],
            vec![(0, 10)],
        ] {
            let owned_by: Vec<Vec<(usize, usize)>> = owned.iter().map(|own| vec![*own]).collect();
            let mut written = vec![0; 10];
            for (rank, (start, len)) in owned.iter().enumerate() {
                let range = ranges_to_write(&owned_by, rank).remove(0);
                assert!(range.is_empty() || (*start <= range.start && range.end <= start + len), "{owned:?}");
                range.for_each(|element| written[element] += 1);
            }
            assert_eq!(written, [1; 10], "{owned:?}");
        }
    }
}
